"""`unavailable`: the one error of a client for all that may happen to its connections."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from headrace_broker.errors import HeadraceBrokerError, QueueUnavailableError
from headrace_broker.server.connections import CONNECTION_ERRORS
from headrace_broker.settings import BrokerSettings


@contextmanager
def unavailable(settings: BrokerSettings, action: str) -> Iterator[None]:
    """Convert the errors of redis-py, kombu and sockets to a QueueUnavailableError that names the action."""
    try:
        yield
    except HeadraceBrokerError:
        raise  # some are OSErrors too, such as ResultTimeoutError
    except Exception as error:  # not BaseException: a closed generator must import nothing
        if not isinstance(error, _server_errors()):
            raise
        raise QueueUnavailableError(settings.safe_url, action, error) from error


def _server_errors() -> tuple[type[Exception], ...]:
    from kombu.exceptions import BatchPublishError, OperationalError  # here, because readers of streams need no kombu

    return (*CONNECTION_ERRORS, redis.RedisError, OperationalError, BatchPublishError)
