"""Calls of a model's tokenizer, for those who have none: a worker of the model answers them beside its requests.

    asker --> headrace:tokenizer:calls:<model> --> worker --> headrace:tokenizer:answer:<call id> --> asker

So the very code that tokenises requests counts their tokens. Calls wait for no free slot. They are bounded in number
and in time, and none is kept: one that nobody has answered in time is forgotten. What their bodies and answers hold is
in docs/wire.md.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args
from weakref import WeakValueDictionary

from headrace_broker.connections import BLOCK_SECONDS
from headrace_broker.errors import TokenizerCallError
from headrace_broker.events import pack, unpack
from headrace_broker.keys import TOKENIZER_SECONDS, tokenizer_answer_key, tokenizer_calls_key
from headrace_broker.scripts import script

if TYPE_CHECKING:
    import redis
    import redis.asyncio

TokenizerCallKind: TypeAlias = Literal["count", "tokenize", "detokenize"]
KINDS: Final[tuple[TokenizerCallKind, ...]] = get_args(TokenizerCallKind)
MOST_WAITING: Final = 64
"""Calls on one list; a call is as large as a request may be."""
MOST_OF_ASKER: Final = 16
"""Calls of one asker that are in Redis at once; further ones wait in its own memory."""
MOST_OF_KEY: Final = 4
"""Calls of one API key among those of an asker; further ones wait, so that they keep no others out."""
ANSWER_SECONDS: Final = float(TOKENIZER_SECONDS)
_KEPT_MS: Final = 1000 * TOKENIZER_SECONDS
_PUSH: Final = script("tokenizer_push")
_LEAST_BLOCK_SECONDS: Final = 0.01
"""To Redis, a time-out of 0 is none."""


@dataclass(frozen=True, slots=True)
class TokenizerCall:
    """A call as a worker takes it."""

    id: str
    kind: TokenizerCallKind
    body: bytes = field(repr=False)
    """A map in msgpack, which is somebody's text: it is read where requests are read."""


class TokenizerAsker:
    """Belongs to one event loop.

    Args:
        client: from `connections.connect_async`.
        seconds: after which a call has failed.
    """

    def __init__(self, client: "redis.asyncio.Redis", *, seconds: float = ANSWER_SECONDS) -> None:
        self._client: Final = client
        self._seconds: Final = seconds
        self._push: Final = client.register_script(_PUSH.text)
        self._room: Final = asyncio.Semaphore(MOST_OF_ASKER)
        self._rooms_of_keys: Final[WeakValueDictionary[str, asyncio.Semaphore]] = WeakValueDictionary()

    async def call(
        self, model: str, kind: TokenizerCallKind, body: Mapping[str, Any], *, key: str = ""
    ) -> dict[str, Any]:
        """The result of a call, answered by some worker of this served name. Redis's errors pass through.

        Args:
            key: whose call it is; see MOST_OF_KEY.

        Raises TokenizerCallError where the worker refuses it, where none answers in time, or where too many wait.
        """
        deadline = time.monotonic() + self._seconds
        call_id = uuid.uuid4().hex
        packed = b"|".join((call_id.encode(), kind.encode(), pack(body)))
        room_of_key = self._rooms_of_keys.setdefault(key, asyncio.Semaphore(MOST_OF_KEY))
        try:
            async with asyncio.timeout(self._seconds), room_of_key, self._room:
                milliseconds = max(1, math.ceil(1000 * (deadline - time.monotonic())))
                args: list[bytes | int] = [packed, MOST_WAITING, milliseconds, _KEPT_MS]
                if not await self._push(keys=_PUSH.keys(tokenizer_calls=tokenizer_calls_key(model)), args=args):
                    message = f"the workers of {model} have {MOST_WAITING} calls of the tokenizer to answer; try again"
                    raise TokenizerCallError("tokenizer_unavailable", message)
                return await self._answer(call_id, deadline)
        except TimeoutError:
            message = f"no worker of {model} has answered within {self._seconds:g} s; try again"
            raise TokenizerCallError("tokenizer_unavailable", message) from None

    async def _answer(self, call_id: str, deadline: float) -> dict[str, Any]:
        key = tokenizer_answer_key(call_id)
        popped: Any = None
        # it ends by itself, too: asyncio.wait_for of Python 3.11, in redis-py, can lose the cancellation of a timeout
        while popped is None and (left := deadline - time.monotonic()) > 0:
            popped = await self._client.blpop([key], timeout=max(_LEAST_BLOCK_SECONDS, min(BLOCK_SECONDS, left)))
        if popped is None:
            raise TimeoutError
        answer = unpack(popped[1])
        if "error" in answer:
            raise TokenizerCallError(str(answer["error"]["code"]), str(answer["error"]["message"]))
        result: dict[str, Any] = answer["result"]
        return result


class TokenizerCalls:
    """A worker's side.

    Args:
        client: from `connections.connect`; `take` waits in one of its connections.
        models: the names that the worker serves.
    """

    def __init__(self, client: "redis.Redis", models: Iterable[str]) -> None:
        self._client: Final = client
        self._keys: Final = [tokenizer_calls_key(model) for model in models]

    def take(self, seconds: float) -> TokenizerCall | None:
        """The next call; None where none has come, or none that somebody still waits for. Redis's errors pass."""
        popped: Any = self._client.blpop(self._keys, timeout=seconds)
        if popped is None:
            return None
        ends, call_id, kind, body = (*popped[1].split(b"|", 3), b"", b"", b"")[:4]
        kinds = {each.encode(): each for each in KINDS}
        now, microseconds = self._client.time()
        if kind not in kinds or not ends.isdigit() or int(ends) < 1000 * now + microseconds // 1000:
            return None
        return TokenizerCall(call_id.decode(errors="replace"), kinds[kind], body)

    def answer(self, call: TokenizerCall, answer: bytes) -> None:
        """Send an answer, a map in msgpack. Redis's errors pass through."""
        key = tokenizer_answer_key(call.id)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.rpush(key, answer)
            pipe.pexpire(key, _KEPT_MS)
            pipe.execute()
