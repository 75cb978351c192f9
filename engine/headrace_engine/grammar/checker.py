"""Compiles each grammar in a separate process before its request is accepted.

A grammar of a few hundred bytes can take seconds of work, gigabytes of states, or a recursion that ends the process. No
list of bad patterns would be complete. So the trial runs in a process with lower limits of processor time, memory and
stack than the core. A grammar that compiles in it will compile in the core too. The processes exchange lines of JSON.
"""

import json
import logging
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headrace_engine.errors import InvalidRequestError
from headrace_engine.grammar.errors import GrammarError
from headrace_engine.grammar.grammar import GrammarCompiler, TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

# The largest schemas that hosted services accept compile in a fifth of this time.
CPU_SECONDS = 0.5
_MEMORY_BYTES = 1 << 30
# A quarter of the stack of the core's threads that compile grammars and compute masks.
_STACK_BYTES = 2 << 20
# Usually the limit of processor time ends a trial. This limit is for a machine so busy that the trial does not run.
_WAIT_SECONDS = 60.0
_MAX_VERDICTS = 4096
# Exit statuses of a process that was killed from outside, or by the kernel when memory is short.
_ENDED_FROM_OUTSIDE = (-signal.SIGTERM, -signal.SIGKILL)


class GrammarChecker:
    """Refuses grammars that cannot be used. Starts its process for the first grammar, and caches results."""

    def __init__(self, definition: Callable[[], TokenizerDefinition]) -> None:
        self._definition = definition
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._verdicts: OrderedDict[int, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError with the reason if the grammar cannot be used."""
        source = json.dumps(asdict(params))
        key = hash(source)
        try:
            problem = self._verdicts[key]  # without the lock: a cached result need not wait for another trial
        except KeyError:
            problem = self._try_once(key, source)
        if problem is not None:
            raise InvalidRequestError(f"structured_outputs: {problem}")

    def _try_once(self, key: int, source: str) -> str | None:
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._try(source)
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            return self._verdicts[key]

    def close(self) -> None:
        """End the process; the next check starts another one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = None

    def _try(self, source: str) -> str | None:
        for _ in range(2):  # a second time if the process was killed from outside: the grammar may be good
            process = self._process or self._start()
            timed_out = False
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(source.encode() + b"\n")
                process.stdin.flush()
                timed_out = not select.select([process.stdout], [], [], _WAIT_SECONDS)[0]
                if timed_out:
                    process.kill()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if answer:
                verdict: str | None = json.loads(answer)
                return verdict
            status = process.wait()
            self.close()
            self._start()  # now, so that the next grammar does not wait for the start
            if timed_out or status not in _ENDED_FROM_OUTSIDE:
                return _REASONS.get(-status, _TOO_LARGE)
        return _TOO_LARGE

    def _start(self) -> "subprocess.Popen[bytes]":
        definition = self._definition()
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace_engine.grammar.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # `_try` notices the end of the process when it reads the answer
            sizes = definition.vocab_size, list(definition.eos_token_ids), len(definition.tokenizer_json)
            process.stdin.write(json.dumps(sizes).encode() + b"\n")
            process.stdin.write(definition.tokenizer_json)
        return process


_TOO_SLOW = f"the grammar takes more than {CPU_SECONDS:g} s to compile"
_TOO_LARGE = f"the grammar takes more than {_MEMORY_BYTES >> 20} MiB to compile, or is nested too deeply"
_REASONS: dict[int, str] = {signal.SIGVTALRM: _TOO_SLOW, signal.SIGKILL: _TOO_SLOW}


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # the process is gone, and cannot read what is still buffered
                pipe.close()


def _serve() -> None:
    lines = sys.stdin.buffer
    sizes = lines.readline()
    if not sizes:
        return
    vocab_size, eos_token_ids, num_bytes = json.loads(sizes)
    content = lines.read(num_bytes)
    compiler: GrammarCompiler | str
    try:
        compiler = GrammarCompiler(
            TokenizerDefinition(tokenizer_json=content, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        )
    except GrammarError as error:
        compiler = str(error)
    del content
    with open("/proc/self/statm") as sizes:  # noqa: PTH123
        in_use = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    for line in lines:
        verdict = compiler if isinstance(compiler, str) else _within_limits(compiler, line)
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


def _within_limits(compiler: GrammarCompiler, line: bytes) -> str | None:
    verdict: list[str] = []

    def compile_it() -> None:
        try:
            compiler.check(StructuredOutputsParams(**json.loads(line)))
        except GrammarError as error:
            verdict.append(str(error))

    thread = threading.Thread(target=compile_it)
    # The signal is not caught: it ends the process, and the parent reads the reason from the exit status.
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return verdict[0] if verdict else None


if __name__ == "__main__":
    _serve()
