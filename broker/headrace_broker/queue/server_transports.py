"""The lease transport for servers without a fixed host and port: Unix sockets and Sentinels.

`app.make_app` selects them and passes their options.
"""

from typing import Any

import redis
from kombu.utils.url import maybe_sanitize_url

from headrace_broker.queue.transport import Channel, Transport
from headrace_broker.server.sentinel import MasterConnection, MasterTlsConnection, master_pool


class SocketTransport(Transport):
    """For URLs such as socket:///run/redis.sock?virtual_host=0."""

    can_parse_url = True  # makes kombu's connection pass the URL unparsed to its channel, which can parse it

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        return uri if include_password else str(maybe_sanitize_url(uri, mask))


class SentinelChannel(Channel):
    """Every connection, including those of blocking waits, asks the Sentinels for the master when it connects."""

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
    """For the URL of any one of the Sentinels."""

    Channel = SentinelChannel
    default_port = 26379
