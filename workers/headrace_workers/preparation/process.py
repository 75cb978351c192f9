"""The process that prepares requests: it decodes bodies, renders chats, tokenises prompts and compiles grammars.

Each of these steps can take seconds, and no check can predict it. In this process they delay no lease renewal, no
stream and no probe. `preparer_process.py` is the parent's side. Both write msgpack frames with a length prefix:

    parent -> child   {settings}, once; [number, request id, content type, body, name of the task];
                      [0, grammar, problem or nil]: the verdict of another process;
                      [number below 0, kind, body]: a tokenizer call
    child -> parent   [0], once, when it can prepare requests; [number, kind, values ...]; [0, grammar, problem or nil]

A quick process spends a fraction of a second on a request, and answers `slow` if that is not enough. The other process
dies if a request exceeds its processor time; the parent reads the reason from its exit status.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Final

import msgpack

from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_factory import create_tokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts

MEMORY_BYTES: Final = 1 << 30
QUICK_BODY_BYTES: Final = 32 << 10
"""A tokenizer takes some 10 ms for a prompt of this size."""
_SLOW_NICENESS: Final = 5
"""On a processor that streams need too, a large request then gets a third. At 10 it might exceed its time limit."""
_LENGTH: Final = struct.Struct("<Q")
_PR_SET_PDEATHSIG: Final = 1


def packed(frame: Any) -> bytes:
    """Pack a frame with its length prefix."""
    data: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Assembles frames from the bytes that `read` returns, which may be fewer than asked for.

    It reads no byte beyond the current frame. So the rest stays in the pipe, and the event loop sees it as readable.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._data = bytearray()
        self._length: int | None = None

    def next(self) -> Any:
        """Read one frame. Raises EOFError at the end, and passes BlockingIOError through; the next call continues."""
        while True:
            missing = (_LENGTH.size if self._length is None else self._length) - len(self._data)
            if missing > 0:
                data = self._read(missing)
                if not data:
                    raise EOFError
                self._data += data
            elif self._length is None:
                (self._length,) = _LENGTH.unpack(self._data)
                self._data.clear()
            else:
                frame = msgpack.unpackb(self._data, raw=False, strict_map_key=False)
                self._data, self._length = bytearray(), None
                return frame


def _make_tokenizer(settings: dict[str, Any]) -> ModelTokenizer:
    """Make the tokenizer before anything else: for a large one, this step takes the most memory of the process."""
    parts = TokenizerParts(**settings.pop("tokenizer"))
    return create_tokenizer(settings["model"], parts, trust_remote_code=settings["trust_remote_code"])


def _limit_memory() -> None:
    with open("/proc/self/statm") as sizes:  # noqa: PTH123
        in_use = int(sizes.read().split()[0]) * resource.getpagesize()
    # Only the soft limit: the process that compiles grammars sets its own.
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    def send(frame: Any) -> None:
        answers.write(packed(frame))
        answers.flush()

    if sys.argv[1:] != ["quick"]:
        os.nice(_SLOW_NICENESS)
    reader = FrameReader(requests.read)
    settings = reader.next()
    tokenizer = _make_tokenizer(settings)
    from headrace_workers.preparation.preparer import make_preparer  # its imports take 40 MB

    preparer = make_preparer(settings, tokenizer, lambda grammar, problem: send([0, grammar, problem]))
    _limit_memory()
    send([0])
    while True:
        number, *values = reader.next()
        if number > 0:
            send([number, *preparer.answer(*values)])
        elif number < 0:
            send([number, *preparer.answer_call(*values)])
        else:
            preparer.learn(*values)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the parent decides when this process ends
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123  # output of a library must not mix with frames
        os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
    try:
        _serve(requests, answers)
    except (EOFError, BrokenPipeError):
        return  # the parent has died, or closed the pipes


if __name__ == "__main__":
    _main()
