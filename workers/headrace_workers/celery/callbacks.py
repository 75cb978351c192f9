"""`Callbacks`: what a request sends when it ends: its links, the next step of its chain, and its part of a chord."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from celery import Celery, group, states
from celery.app.task import Context
from celery.canvas import maybe_signature

from headrace_broker.content import SERIALIZERS, answer_type, dumps_result, loads
from headrace_broker.errors import CallbacksTooLargeError
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.final_writes import FinalWrites
from headrace_broker.queue.worker_port import DeliveryInfo
from headrace_broker.server.connections import REDIS_ERRORS, is_fault_of_server
from headrace_monitoring.logging import frames
from headrace_wire.errors import InvalidRequestError
from headrace_wire.values import is_request_id
from headrace_workers.celery.callback_app import Collected, collecting, make_callback_app
from headrace_workers.errors import FailedRequestError
from headrace_workers.preparation.callback_rules import MAX_BODY_BYTES, CallbackRules, Links, group_index_of
from headrace_workers.preparation.celery_request import CeleryRequest
from headrace_workers.preparation.intake import tenant_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """The part of a `CeleryRequest` that callbacks need, of a dead letter."""

    id: str
    task_name: str
    request_dict: Mapping[str, Any]
    body: bytes | str
    content_type: str
    delivery: DeliveryInfo


class Callbacks:
    """Builds the messages of callbacks with Celery's own code.

    A result with an `error` counts as a failure, although Celery's state of the request is SUCCESS.
    """

    def __init__(self, worker_app: Celery, rules: CallbackRules) -> None:
        self._rules = rules
        self._app_of = cache(lambda serializer: make_callback_app(worker_app, rules, serializer))

    def final_writes(
        self, request: CeleryRequest | DeadRequest, result: Mapping[str, Any], *, is_dead: bool = False
    ) -> FinalWrites | None:
        """Return what the request sends with this result; None if its message has no callbacks.

        Redis's errors pass through: a part of a chord is recorded in Redis.

        Args:
            is_dead: the message becomes a dead letter.
        """
        error = result.get("error")
        if error is None and len(request.body) > MAX_BODY_BYTES:
            return None  # with links it would have been refused
        links = self._rules.links_in(request.body, request.content_type)
        if links is None:
            return None
        failure = None if error is None else FailedRequestError(f"{error['code']}: {error['message']}")
        # Celery checks some options of a signature only when it sends it.
        writes = self._built(request, links, result, failure)
        if isinstance(writes, FailedRequestError) and failure is None:
            writes = self._built(request, links, result, writes)
        if not writes or isinstance(writes, FailedRequestError):
            return None
        writes.once(request.id, request.delivery.content, is_dead=is_dead)
        return writes

    def send_dead(self, client: "redis.Redis", letter: DeadLetter) -> None:
        """Send the errbacks of a message that became a dead letter in a fetch. Redis's errors pass through."""
        if letter.answered_id is None:
            return
        request = DeadRequest(
            letter.answered_id,
            str(letter.task),
            letter.headers,
            letter.message_body,
            letter.content_type,
            DeliveryInfo(content=letter.content),
        )
        writes = self.final_writes(request, {"error": letter.error.to_wire()}, is_dead=True)
        if writes is not None:
            writes.make(client)

    def _built(
        self,
        request: CeleryRequest | DeadRequest,
        links: Links,
        result: Mapping[str, Any],
        failure: FailedRequestError | None,
    ) -> FinalWrites | FailedRequestError:
        """Return the writes of a request that succeeded or failed; why it failed if a signature is refused."""
        content_type = answer_type(request.content_type)
        app = self._app_of(SERIALIZERS[content_type])
        context = _context(request, links)
        try:
            with collecting(app, Collected(self._rules, tenant_in(request.request_dict), content_type)) as writes:
                if failure is None:
                    _succeed(app, context, links, loads(dumps_result(result, content_type), content_type))
                else:
                    _fail(app, context, failure)
        except Exception as error:  # the signature is the sender's
            if _is_redis_away(error):
                raise
            logger.error("callbacks of request %s not sent: %s", request.id, frames(error))
            is_own = isinstance(error, InvalidRequestError | CallbacksTooLargeError)
            return FailedRequestError(f"its callbacks could not be sent: {error if is_own else type(error).__name__}")
        return writes


def _context(request: CeleryRequest | DeadRequest, links: Links) -> Context:
    """Return Celery's context of the request, with what its backend reads of it."""
    headers = request.request_dict
    root_id = headers.get("root_id")
    return Context(
        id=request.id,
        task=request.task_name,
        root_id=root_id if is_request_id(root_id) else request.id,
        group=headers.get("group"),
        group_index=group_index_of(headers.get("group_index")),
        errbacks=links.errbacks,
        chain=links.chain,
        chord=links.chord,
        delivery_info={},
    )


def _succeed(app: Celery, context: Context, links: Links, value: Any) -> None:
    """Send the callbacks and the next step, as Celery's tracer does, and return the part of a chord."""
    about = {"parent_id": context.id, "root_id": context.root_id}
    signatures = [maybe_signature(each, app=app) for each in links.callbacks]
    together = [each for each in signatures if not isinstance(each, group)]
    if len(signatures) > 1 and together:
        signatures = [*(each for each in signatures if isinstance(each, group)), group(together, app=app)]
    for signature in signatures:
        signature.apply_async((value,), **about)
    if links.chain:
        maybe_signature(links.chain[-1], app=app).apply_async((value,), chain=links.chain[:-1], **about)
    if links.chord is not None:
        app.backend.on_chord_part_return(context, states.SUCCESS, value)


def _fail(app: Celery, context: Context, failure: Exception) -> None:
    """Return the part of a chord, fail the rest of the chain, and send the errbacks, as Celery's backend does.

    Each of the three is done whether or not the others can be.
    """
    steps: list[Callable[[], object]] = [lambda: app.backend._fail_chain(context.chain, failure)]
    if context.chord is not None:
        steps.insert(0, lambda: app.backend.on_chord_part_return(context, states.FAILURE, failure))
    if context.errbacks:
        steps.append(lambda: app.backend._call_task_errbacks(context, failure, None))
    for step in steps:
        try:
            step()
        except Exception as error:  # the signature is the sender's
            if _is_redis_away(error):
                raise
            logger.error("a callback of failed request %s not sent: %s", context.id, frames(error))


def _is_redis_away(error: Exception) -> bool:
    """Return whether another attempt may help. It does not for values and rights that Redis refuses."""
    is_refusal = isinstance(error, redis.DataError | redis.exceptions.NoPermissionError)
    return isinstance(error, REDIS_ERRORS) and not is_refusal and is_fault_of_server(error)
