"""The worker's side of Celery's remote control: checks control messages and answers them.

Any client that may publish in Redis can send one, and Celery trusts it. An invalid message makes Celery reopen its
mailbox and miss messages meanwhile. A clock value of many digits is copied into every later message. A regular
expression can block the event loop for ever. The answer goes to any list that the sender names. So messages are checked
here. The commands are in `commands.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import structlog
from celery.app.control import Control
from kombu.exceptions import EncodeError, InconsistencyError, OperationalError
from kombu.matcher import match
from kombu.pidbox import Mailbox, Node

from headrace_broker.content import SERIALIZERS, answer_type
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_monitoring.logging import frames
from headrace_wire.values import is_integer
from headrace_workers.celery.result_backend import COMMAND_CONTENT_TYPE
from headrace_workers.errors import HeadraceWorkerError

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

_MAX_CLOCK: Final = 2**53
_MAX_NAME_CHARS: Final = 256
_MAX_ERROR_CHARS: Final = 500


class ControlMessageError(HeadraceWorkerError):
    """A control message is not valid. The error quotes nothing of the message."""


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One command for some or all workers, with the destination of its answer."""

    method: str
    arguments: dict[str, Any]
    destination: list[str] | None
    pattern: str | None
    matcher: str | None
    routing_key: str | None
    """Destination of the answer; None for no answer."""
    ticket: str | None

    @classmethod
    def read(cls, body: object, reply_exchange: str) -> Self:
        """Read and check a message's body. Raises ControlMessageError."""
        if not isinstance(body, Mapping):
            raise ControlMessageError("the message is not a map")
        arguments = body.get("arguments") or {}
        if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
            raise ControlMessageError("its arguments are not a map with names as keys")
        destination = body.get("destination")
        if destination is not None and not isinstance(destination, list | tuple):
            raise ControlMessageError("its destination is not a list")
        method = _name(body, "method")
        if method is None:
            raise ControlMessageError("its method is missing")
        reply_to = body.get("reply_to") or {}
        if not isinstance(reply_to, Mapping):
            raise ControlMessageError("its reply_to is not a map")
        routing_key = _name(reply_to, "routing_key")
        if routing_key is not None and reply_to.get("exchange") != reply_exchange:
            raise ControlMessageError(f"its reply_to must name the exchange {reply_exchange}")
        names = [name for name in destination or () if isinstance(name, str)]
        return cls(
            method=method,
            arguments=arguments,
            destination=names if destination else None,
            pattern=_name(body, "pattern"),
            matcher=_name(body, "matcher"),
            routing_key=routing_key,
            ticket=_name(body, "ticket"),
        )

    def is_for(self, hostname: str) -> bool:
        """Return whether the command is for this worker. Raises ControlMessageError if the pattern is not a glob."""
        if self.destination is not None:
            return hostname in self.destination
        if self.pattern and self.matcher:
            if self.matcher != "glob":
                raise ControlMessageError("its matcher must be glob: a regular expression could block the worker")
            return bool(match(hostname, self.pattern, self.matcher))
        return True


class ControlNode(Node):
    """Runs each command and answers in the content type of its message."""

    def handle_message(self, body: Any, message: Any = None) -> Any:
        """Run a message's command. Raises only if the command ends the worker or Redis is unavailable."""
        try:
            command = ControlMessage.read(body, self.mailbox.reply_exchange.name)
            if not command.is_for(self.hostname):
                return None
        except ControlMessageError as error:
            logger.warning("control message refused", reason=str(error))
            return None
        content_type = answer_type(None)
        if message is not None:
            content_type = answer_type(message.content_type)
            clock = message.headers.get("clock")
            if is_integer(clock) and 0 <= clock < _MAX_CLOCK:
                self.adjust_clock(clock)
        token = COMMAND_CONTENT_TYPE.set(content_type)
        try:
            reply = self._run(command)
        finally:
            COMMAND_CONTENT_TYPE.reset(token)
        if command.routing_key is not None:
            self._answer(reply, command, content_type)
        return reply

    def _run(self, command: ControlMessage) -> Any:
        if command.method not in self.handlers:
            return {"error": "unknown command"}
        try:
            return self.handlers[command.method](self.state, **command.arguments)
        except Exception as error:  # noqa: BLE001  # from any command, with any arguments
            logger.warning("control command failed", command=command.method, raised=frames(error))
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}

    def _answer(self, reply: Any, command: ControlMessage, content_type: str) -> None:
        try:
            self._send(reply, command, content_type)
        except EncodeError:
            reply = {"error": f"the answer cannot be written as {content_type}"}
            self._send(reply, command, content_type)
        except InconsistencyError:
            return  # the client no longer waits for it
        except (*REDIS_ERRORS, OperationalError):
            raise
        except Exception as error:  # noqa: BLE001  # an answer that cannot be sent must not end the worker
            logger.warning("control command not answered", command=command.method, raised=frames(error))

    def _send(self, reply: Any, command: ControlMessage, content_type: str) -> None:
        self.mailbox._publish_reply(
            {self.hostname: reply},
            self.mailbox.reply_exchange.name,
            command.routing_key,
            command.ticket,
            channel=self.channel,
            serializer=SERIALIZERS[content_type],
        )


class WorkerMailbox(Mailbox):
    """Celery's mailbox with `ControlNode`."""

    node_cls = ControlNode


class WorkerControl(Control):
    """Celery's remote control with `WorkerMailbox`."""

    Mailbox = WorkerMailbox


def _name(body: Mapping[Any, Any], field: str) -> str | None:
    value = body.get(field)
    if value is None or (isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS and value.isprintable()):
        return value
    raise ControlMessageError(f"its {field} must be printable text of 1 to {_MAX_NAME_CHARS} characters")
