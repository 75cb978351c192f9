"""The lease transport for servers that are not at a host and a port: a socket of this machine, and Sentinels.

`app.make_app` selects them and gives them what they want to know.
"""

from typing import Any

import redis
from kombu.utils.url import maybe_sanitize_url

from headrace_broker.sentinel import MasterConnection, MasterTlsConnection, master_pool
from headrace_broker.transport import Channel, Transport


class SocketTransport(Transport):
    """With a URL such as socket:///run/redis.sock?virtual_host=0."""

    can_parse_url = True  # kombu's channel takes this URL apart, as soon as kombu's connection leaves it whole

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        return uri if include_password else str(maybe_sanitize_url(uri, mask))


class SentinelChannel(Channel):
    """Each of its connections asks the Sentinels for the master when it connects, the doorbells' among them."""

    connection_class = MasterConnection
    connection_class_ssl = MasterTlsConnection
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_kwargs: dict[str, Any] | None = None
    keyprefix_fanout: str
    from_transport_options = (*Channel.from_transport_options, "sentinels", "master_name", "sentinel_kwargs")

    def _get_pool(self, asynchronous: bool = False) -> "redis.ConnectionPool":
        parameters = self._connparams(asynchronous=asynchronous)
        self.keyprefix_fanout = self.keyprefix_fanout.format(db=parameters["db"])
        return self.make_pool(parameters)

    def make_pool(self, parameters: dict[str, Any]) -> "redis.ConnectionPool":
        master = {name: value for name, value in parameters.items() if name not in ("host", "port")}
        return master_pool(self.sentinels, str(self.master_name), self.sentinel_kwargs or {}, **master)


class SentinelTransport(Transport):
    """With the URL of any of the Sentinels."""

    Channel = SentinelChannel
    default_port = 26379
