"""Calls of a model's tokenizer, for clients that have no tokenizer. A worker of the model answers them.

    client --> headrace:tokenizer:calls:<model> --> worker --> headrace:tokenizer:answer:<call id> --> client

So tokens are counted by the code that also tokenises requests. A call takes no slot of the engine. The number of calls
and their lifetime are limited: a call that no worker takes in time is dropped. docs/wire.md describes calls and
answers.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args
from weakref import WeakValueDictionary

import redis
import redis.asyncio

from headrace_broker.errors import TokenizerCallError
from headrace_broker.keys import TOKENIZER_SECONDS, tokenizer_answer_key, tokenizer_calls_key
from headrace_broker.packing import pack, unpack
from headrace_broker.scripts import script
from headrace_broker.server.connections import BLOCK_SECONDS
from headrace_wire.codes import GatewayCode

TokenizerCallKind: TypeAlias = Literal["count", "tokenize", "detokenize"]
KINDS: Final[tuple[TokenizerCallKind, ...]] = get_args(TokenizerCallKind)
MAX_WAITING_CALLS: Final = 64
"""Limit for the calls on one list. A call may be as large as a request."""
MAX_CALLS_PER_CLIENT: Final = 16
"""Limit for the calls of one client in Redis. Further ones wait in the client's memory."""
MAX_CALLS_PER_KEY: Final = 4
"""Limit for one API key among the calls of a client. Further ones wait, so that they do not delay other keys."""
ANSWER_SECONDS: Final = float(TOKENIZER_SECONDS)
_KEPT_MS: Final = 1000 * TOKENIZER_SECONDS
_PUSH: Final = script("tokenizer_push")
_MIN_BLOCK_SECONDS: Final = 0.01
"""Above 0, because Redis takes a timeout of 0 as no timeout."""


@dataclass(frozen=True, slots=True)
class TokenizerCall:
    """A call that a worker has taken."""

    id: str
    kind: TokenizerCallKind
    body: bytes = field(repr=False)
    """A msgpack map with a user's text. It is decoded where requests are decoded."""


class TokenizerClient:
    """Sends tokenizer calls. It belongs to one event loop.

    Args:
        client: from `connections.connect_async`.
        seconds: timeout of a call.
    """

    def __init__(self, client: "redis.asyncio.Redis", *, seconds: float = ANSWER_SECONDS) -> None:
        self._client: Final = client
        self._seconds: Final = seconds
        self._push: Final = _PUSH.bound(client)
        self._slots: Final = asyncio.Semaphore(MAX_CALLS_PER_CLIENT)
        self._slots_by_key: Final[WeakValueDictionary[str, asyncio.Semaphore]] = WeakValueDictionary()

    async def call(
        self, model: str, kind: TokenizerCallKind, body: Mapping[str, Any], *, key: str = ""
    ) -> dict[str, Any]:
        """Return the result of a call from any worker of this served name. Redis's errors pass through.

        Args:
            key: the caller's API key; see MAX_CALLS_PER_KEY.

        Raises TokenizerCallError if the worker refuses it, if no worker answers in time, or if too many calls wait.
        """
        deadline = time.monotonic() + self._seconds
        call_id = uuid.uuid4().hex
        packed = b"|".join((call_id.encode(), kind.encode(), pack(body)))
        slots_of_key = self._slots_by_key.setdefault(key, asyncio.Semaphore(MAX_CALLS_PER_KEY))
        try:
            async with asyncio.timeout(self._seconds), slots_of_key, self._slots:
                milliseconds = max(1, math.ceil(1000 * (deadline - time.monotonic())))
                args: list[bytes | int] = [packed, MAX_WAITING_CALLS, milliseconds, _KEPT_MS]
                if not await self._push(*args, tokenizer_calls=tokenizer_calls_key(model)):
                    message = f"{MAX_WAITING_CALLS} tokenizer calls of {model} wait, which is the limit; try again"
                    raise TokenizerCallError(GatewayCode.TOKENIZER_UNAVAILABLE, message)
                return await self._answer(call_id, deadline)
        except TimeoutError:
            message = f"no worker of {model} answered within {self._seconds:g} s; try again"
            raise TokenizerCallError(GatewayCode.TOKENIZER_UNAVAILABLE, message) from None

    async def _answer(self, call_id: str, deadline: float) -> dict[str, Any]:
        key = tokenizer_answer_key(call_id)
        popped: Any = None
        task = asyncio.current_task()
        # The loop checks the deadline itself: redis-py uses asyncio.wait_for, which can lose the cancellation by a
        # timeout in Python 3.11.
        while popped is None and (left := deadline - time.monotonic()) > 0:
            if task is not None and task.cancelling():  # a reply of Redis arrived with the cancellation, which was lost
                raise asyncio.CancelledError
            popped = await self._client.blpop([key], timeout=max(_MIN_BLOCK_SECONDS, min(BLOCK_SECONDS, left)))
        if popped is None:
            raise TimeoutError
        answer = unpack(popped[1])
        if "error" in answer:
            raise TokenizerCallError(str(answer["error"]["code"]), str(answer["error"]["message"]))
        result: dict[str, Any] = answer["result"]
        return result


class TokenizerCalls:
    """The worker's side: takes calls and sends answers.

    Args:
        client: from `connections.connect`; `take` blocks one of its connections.
        models: the names that the worker serves.
    """

    def __init__(self, client: "redis.Redis", models: Iterable[str]) -> None:
        self._client: Final = client
        self._keys: Final = [tokenizer_calls_key(model) for model in models]

    def take(self, seconds: float) -> TokenizerCall | None:
        """Return the next call; None if none arrives within `seconds`, or if it is malformed or past its deadline.

        Redis's errors pass through.
        """
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
        """Send an answer, a msgpack map. Redis's errors pass through."""
        key = tokenizer_answer_key(call.id)
        with self._client.pipeline(transaction=True) as pipe:
            pipe.rpush(key, answer)
            pipe.pexpire(key, _KEPT_MS)
            pipe.execute()
