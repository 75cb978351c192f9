"""The worker's end of Celery's remote control: what a control message may say, and how it is answered.

Anyone who may publish in Redis can send one. Celery trusts its form: a message of another makes it open its mailbox
anew and miss what comes meanwhile, a clock of many digits goes into every later message, a regular expression can keep
the event loop busy for ever, and the answer goes into whatever list the sender names. The commands themselves are in
`remote_control.py` and `celery_commands.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import structlog
from celery.app.control import Control
from kombu.exceptions import EncodeError, InconsistencyError, OperationalError
from kombu.matcher import match
from kombu.pidbox import Mailbox, Node

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.content import SERIALIZERS, answer_type
from headrace_broker.value_rules import is_integer
from headrace_monitoring.logging import frames
from headrace_workers.errors import HeadraceWorkerError
from headrace_workers.result_backend import ASKED_IN

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

_MAX_CLOCK: Final = 2**53
_MAX_NAME_CHARS: Final = 256
_MAX_ERROR_CHARS: Final = 500


class ControlMessageError(HeadraceWorkerError):
    """A control message is not one that Celery's clients send. Its sentence quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One command, for all workers or some, with the place of its answer where one is wanted."""

    method: str
    arguments: dict[str, Any]
    destination: list[str] | None
    pattern: str | None
    matcher: str | None
    routing_key: str | None
    """Of the answer; None wants no answer."""
    ticket: str | None

    @classmethod
    def read(cls, body: object, reply_exchange: str) -> Self:
        """Raises ControlMessageError."""
        if not isinstance(body, Mapping):
            raise ControlMessageError("the message is no map")
        arguments = body.get("arguments") or {}
        if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
            raise ControlMessageError("its arguments are no map of names")
        destination = body.get("destination")
        if destination is not None and not isinstance(destination, list | tuple):
            raise ControlMessageError("its destination is no list")
        method = _name(body, "method")
        if method is None:
            raise ControlMessageError("its method is missing")
        reply_to = body.get("reply_to") or {}
        if not isinstance(reply_to, Mapping):
            raise ControlMessageError("its reply_to is no map")
        routing_key = _name(reply_to, "routing_key")
        if routing_key is not None and reply_to.get("exchange") != reply_exchange:
            raise ControlMessageError(f"its reply_to names another exchange than {reply_exchange}")
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
        """Raises ControlMessageError for a pattern that no worker tries."""
        if self.destination is not None:
            return hostname in self.destination
        if self.pattern and self.matcher:
            if self.matcher != "glob":
                raise ControlMessageError("its pattern is no glob: a regular expression could keep the worker busy")
            return bool(match(hostname, self.pattern, self.matcher))
        return True


class ControlNode(Node):
    """Runs each command and answers in the content type of its message."""

    def handle_message(self, body: Any, message: Any = None) -> Any:
        """Never raises, but where the command ends the worker or Redis is away."""
        try:
            command = ControlMessage.read(body, self.mailbox.reply_exchange.name)
            if not command.is_for(self.hostname):
                return None
        except ControlMessageError as error:
            logger.warning("control message refused", reason=str(error))
            return None
        asked_in = answer_type(None)
        if message is not None:
            asked_in = answer_type(message.content_type)
            clock = message.headers.get("clock")
            if is_integer(clock) and 0 <= clock < _MAX_CLOCK:
                self.adjust_clock(clock)
        token = ASKED_IN.set(asked_in)
        try:
            reply = self._run(command)
        finally:
            ASKED_IN.reset(token)
        if command.routing_key is not None:
            self._answer(reply, command, asked_in)
        return reply

    def _run(self, command: ControlMessage) -> Any:
        if command.method not in self.handlers:
            return {"error": "the worker knows no such command"}
        try:
            return self.handlers[command.method](self.state, **command.arguments)
        except Exception as error:  # noqa: BLE001  # of any command, with whatever arguments
            logger.warning("control command failed", command=command.method, raised=frames(error))
            return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}

    def _answer(self, reply: Any, command: ControlMessage, content_type: str) -> None:
        try:
            self._send(reply, command, content_type)
        except EncodeError:
            reply = {"error": f"the answer cannot be written as {content_type}"}
            self._send(reply, command, content_type)
        except InconsistencyError:
            return  # nobody waits for it any more
        except (*REDIS_ERRORS, OperationalError):
            raise
        except Exception as error:  # noqa: BLE001  # an answer that cannot be given must not end the worker
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
    """Celery's mailbox with our node."""

    node_cls = ControlNode


class WorkerControl(Control):
    """Celery's remote control with our mailbox."""

    Mailbox = WorkerMailbox


def _name(body: Mapping[Any, Any], field: str) -> str | None:
    value = body.get(field)
    if value is None or (isinstance(value, str) and 0 < len(value) <= _MAX_NAME_CHARS and value.isprintable()):
        return value
    raise ControlMessageError(f"its {field} is no printable text of at most {_MAX_NAME_CHARS} characters")
