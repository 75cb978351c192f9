"""`ChordParts`: counts a request as a part of its chord, and sends the chord's body with the last part.

Celery's own script records the part, so the other parts may run on any Celery worker. It records a part once, even if
it is called again after a crash. It gives the claim to send the body to the caller that completes the chord. The claim
of a Headrace worker has the id of the request as its token, so the next worker of that request holds it, too. The body
is sent in the script that acknowledges the request, if the claim is then held by nobody else.
"""

import json
from typing import Any, Final

import msgpack
from celery import states
from celery.canvas import maybe_signature
from celery.exceptions import ChordError

from headrace_broker.queue.final_writes import FinalWrites
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_wire.values import is_request_id
from headrace_workers.preparation.callback_rules import group_index_of

_DONE: Final = b"done"
_DONE_SECONDS: Final = 3600
_CLAIM_SECONDS: Final = 60
_GONE: Final = -1
"""Celery's script returns it as the number of parts of a chord whose body was sent."""


class ChordParts:
    """Args:
    backend: the application's backend, which has Celery's script.
    writes: gets the writes that send the body.
    """

    def __init__(self, backend: Any, writes: FinalWrites) -> None:
        self._backend = backend
        self._writes = writes

    def returned(self, request: Any, state: str, result: Any) -> None:
        """Record the part of an ended task. Redis's errors pass through.

        Args:
            request: Celery's context of the task, with its id, group, group_index and chord.
        """
        group_id, backend = request.group, self._backend
        if not is_request_id(group_id):
            return
        keys = {name: backend.get_key_for_group(group_id, f".{name}") for name in "jtsdc"}
        saved = backend.get_key_for_group(group_id)
        token = f"headrace {request.id}"
        index = group_index_of(request.group_index)
        part = backend.encode([1, request.id, state, backend.encode_result(result, state)])
        count, extra, size, is_claimed = backend._chord_part_return_script(
            keys=[keys["j"], keys["t"], keys["s"], keys["d"], saved, keys["c"]],
            args=[
                request.id,
                part,
                int(backend._chord_zset),
                "+inf" if index is None else index,
                backend.chord_expires or 0,
                backend._chord_result_expires,
                _CLAIM_SECONDS,
                token,
            ],
            client=backend.client,
        )
        if count == _GONE or not size or count != int(size) + int(extra or 0):
            return
        if is_claimed or backend.client.get(keys["c"]) == token.encode():
            self._send_body(request, {name: key.decode() for name, key in keys.items()}, saved, token)

    def _send_body(self, request: Any, keys: dict[str, str], saved: bytes, token: str) -> None:
        body = maybe_signature(request.chord, app=self._backend.app)
        first = len(self._writes)
        try:
            body.delay(self._joined(keys["j"], saved))
        except REDIS_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  # a part has failed, or the body cannot be sent
            self._writes.cut(first)
            failure = error if isinstance(error, ChordError) else ChordError(f"Callback error: {error!r}")
            self._backend.chord_error_from_stack(body, failure)
        for name in "jtsd":
            self._writes.delete(keys[name])
        self._writes.set(keys["c"], _DONE, _DONE_SECONDS)
        self._writes.claimed(first, keys["c"], token)

    def _joined(self, parts_key: str, saved: bytes) -> list[Any]:
        """Return the results of the parts in the order of the header. Raises ChordError if a part has failed."""
        client = self._backend.client
        stored = client.zrange(parts_key, 0, -1) if self._backend._chord_zset else client.lrange(parts_key, 0, -1)
        results = []
        for packed in stored:
            _, task_id, state, result = _unpacked(packed)
            if state in states.PROPAGATE_STATES:
                cause = self._backend.exception_to_python(result)
                raise ChordError(f"Dependency {task_id} raised {cause!r}") from cause
            results.append((task_id, result))
        structure = client.get(saved)
        return (
            [result for _, result in results]
            if structure is None
            else _nested(_decoded(structure)["result"], dict(results))
        )


def _nested(structure: Any, results: dict[str, Any]) -> list[Any]:
    """Return results in the structure of a header that has groups inside it, as `GroupResult.as_tuple` gives it."""
    return [
        results[task_id] if children is None else _nested([[task_id], children], results)
        for (task_id, *_), children in structure[1]
    ]


def _unpacked(packed: bytes) -> Any:
    part = _decoded(packed)
    if not isinstance(part, list) or len(part) != 4:
        raise ChordError("a part of the chord cannot be read")
    return part


def _decoded(packed: bytes) -> Any:
    """Decode what a worker of any serializer has stored."""
    try:
        return json.loads(packed) if packed[:1] in (b"[", b"{") else msgpack.unpackb(packed, raw=False)
    except Exception as error:  # noqa: BLE001  # msgpack's errors have no common base
        raise ChordError(f"a part of the chord cannot be read: {type(error).__name__}") from None
