"""An engine under test: sends requests, collects their answers, and checks the invariants of every step."""

import contextlib
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_engine.conformance.case import Broken, expect
from headrace_engine.conformance.rows import Rows
from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import HeadraceEngineError
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.pooling_request import PoolingCoreRequest, PoolingTask
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import TokenLogprobs
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_factory import create_tokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts

# How long to wait for a further step, which may report freed blocks.
_LAST_STEP_SECONDS = 5.0
_TRIES = 20
TEXT = (
    "A mill stands by the river, and the headrace carries the water to its wheel. The wheel turns the stone, "
    "the stone grinds the corn, and the baker in the village makes bread of the flour. In winter the water freezes; "
    "then the miller mends his tools, counts 12 sacks, and waits for spring. When the snow melts the river rises fast, "
    "and the people below the weir carry chairs and books upstairs. A heron watches all of it from the far bank. "
)


@dataclass(slots=True)
class Answer:
    """The outputs of a request so far."""

    request: EngineCoreRequest
    number: int
    """Index among all requests that were sent."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    first_step: int = 0
    """Index of the step with its first token, counted from the last `settle`."""
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    aborted_at: int | None = None
    """Number of requests that had been sent before its abort."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def end(self) -> tuple[str | None, int | str | None]:
        """Finish reason and stop reason."""
        return self.finish.value if self.finish is not None else None, self.stop_reason


class EngineUnderTest:
    """An engine in its child process.

    Args:
        patience: seconds without any output after which a case that waits for one fails.
        start_patience: seconds that the start may take without output.
        end_patience: seconds within which its processes must end.

    Raises:
        ConfigError, ModelLoadError, EngineDeadError, TimeoutError: the engine does not start.
    """

    def __init__(self, config: EngineConfig, *, patience: float, start_patience: float, end_patience: float) -> None:
        self.config = config
        self.core = EngineCoreProcess(config)
        self.patience = patience
        self.end_patience = end_patience
        self._numbers = itertools.count(1)
        self._answers: dict[str, Answer] = {}
        self._rows: dict[str, Rows] = {}
        self._forgotten: set[str] = set()
        self.steps: list[StepStats] = []
        """The statistics of the steps since the last `settle`."""
        self.references: list[Answer] = []
        """The plain engine's answers to the requests that the tight engine gets."""
        try:
            self.info = self.core.wait_ready(start_patience)
            self.capabilities = self.core.capabilities
            self.tokenizer = self._load_tokenizer()
        except BaseException:
            self.close()
            raise
        self.end_tokens = self.info.with_end_token(self.tokenizer.eos_token_id).eos_token_ids

    # -- creating requests --------------------------------------------------------------------------------------

    def prompt(self, length: int = 24, start: int = 0) -> list[int]:
        """Return tokens of an English text, from the position `start`."""
        tokens = [token for token in self.tokenizer.encode(TEXT) if token not in self.end_tokens]
        shift = start * 7 % len(tokens)
        return list(itertools.islice(itertools.cycle([*tokens[shift:], *tokens[:shift]]), length))

    def request(
        self,
        prompt: Sequence[int] | None = None,
        *,
        seed: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        bad_words: Sequence[Sequence[int]] = (),
        **params: Any,
    ) -> EngineCoreRequest:
        """Return a greedy request of 24 tokens that ignores end tokens, unless parameters say otherwise."""
        wanted = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False, **params}
        number = next(self._numbers)
        return EngineCoreRequest(
            request_id=f"conformance:0:{number}",
            prompt_token_ids=list(self.prompt() if prompt is None else prompt),
            sampling_params=SamplingParams(**wanted),
            seed=seed,
            eos_token_ids=list(self.end_tokens),
            priority=priority,
            arrival_time=float(number),
            cache_salt=cache_salt,
            bad_words_token_ids=[list(word) for word in bad_words],
        )

    def again(self, request: EngineCoreRequest, emitted: Sequence[int] = (), **changes: Any) -> EngineCoreRequest:
        """Return the request with a new id and with `emitted`, the tokens of an earlier attempt."""
        number = next(self._numbers)
        return replace(
            request,
            request_id=f"conformance:0:{number}",
            arrival_time=float(number),
            output_token_ids=list(emitted),
            **changes,
        )

    def pooling_request(
        self,
        count: int,
        *,
        task: PoolingTask | None = None,
        lengths: Sequence[int] = (),
        **options: Any,
    ) -> PoolingCoreRequest:
        """Return a request of `count` inputs, of mixed lengths unless they are given."""
        pooling = self.info.pooling
        assert pooling is not None
        most = min(pooling.max_input_tokens, 120)
        lengths = lengths or [1 + (17 * number) % most for number in range(count)]
        return PoolingCoreRequest(
            request_id=f"conformance:0:{next(self._numbers)}",
            task=task or pooling.tasks[0],
            inputs=[self.prompt(length, number) for number, length in enumerate(lengths)],
            **options,
        )

    def pooling_again(
        self, request: PoolingCoreRequest, inputs: Sequence[Sequence[int]], **changes: Any
    ) -> PoolingCoreRequest:
        """Return the request with a new id and other inputs."""
        name = f"conformance:0:{next(self._numbers)}"
        return replace(request, request_id=name, inputs=[list(tokens) for tokens in inputs], **changes)

    # -- sending and waiting ------------------------------------------------------------------------------------

    def send(self, request: EngineCoreRequest) -> Answer:
        answer = Answer(request, next(self._numbers))
        self._answers[request.request_id] = answer
        self._forgotten.discard(request.request_id)
        self.core.add_request(request)
        return answer

    def await_rows(self, request: PoolingCoreRequest) -> Rows:
        """Return the object that collects what the engine sends for the id of the request."""
        rows = self._rows[request.request_id] = Rows(request)
        self._forgotten.discard(request.request_id)
        return rows

    def send_inputs(self, request: PoolingCoreRequest) -> Rows:
        rows = self.await_rows(request)
        self.core.add_request(request)
        return rows

    def finish_rows(self, *requests: Rows) -> list[Rows]:
        """Wait until all these requests have ended."""
        self.wait_until(
            lambda: all(rows.has_ended for rows in requests),
            lambda: f"{sum(not rows.has_ended for rows in requests)} of {len(requests)} requests have not ended",
        )
        return list(requests)

    def pool(self, *requests: PoolingCoreRequest) -> list[Rows]:
        """Send requests and wait until they have ended."""
        return self.finish_rows(*[self.send_inputs(request) for request in requests])

    def abort_rows(self, rows: Rows) -> None:
        self.core.abort_requests([rows.id])
        self.fence()
        rows.is_aborted = True

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process of the engine within the block, so that everything that is sent arrives at once."""
        os.kill(self.core.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.core.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def while_running(self, make: Callable[[], list[EngineCoreRequest]]) -> Iterator[list[Answer]]:
        """Stop the engine when requests run and have at least half of their tokens left.

        So everything sent in the block arrives before these requests end. If they end before the engine is stopped,
        they are created again.
        """
        for _ in range(_TRIES):
            answers = [self.send(request) for request in make()]
            self.await_first_tokens(*answers)
            with self.stopped():
                while self.take(0.0):
                    pass
                if all(self._has_far_to_go(answer) for answer in answers):
                    yield answers
                    return
            self.finish(*answers)
        raise Broken(f"requests ended before anything could be sent after them, {_TRIES} times")

    def _has_far_to_go(self, answer: Answer) -> bool:
        most = answer.request.sampling_params.max_tokens
        if most is None:
            most = self.info.max_model_len - len(answer.request.prompt_token_ids)
        return answer.finish is None and len(answer.tokens) <= most // 2

    def abort(self, *answers: Answer) -> None:
        for answer in answers:
            answer.aborted_at = next(self._numbers)
        self.core.abort_requests([answer.id for answer in answers])

    def finish(self, *answers: Answer) -> list[Answer]:
        """Wait until all these requests have ended."""
        self.wait_until(
            lambda: all(answer.finish is not None for answer in answers),
            lambda: f"{sum(answer.finish is None for answer in answers)} of {len(answers)} requests have not ended",
        )
        return list(answers)

    def await_first_tokens(self, *answers: Answer) -> None:
        """Wait until all these requests have a token."""
        self.wait_until(
            lambda: all(answer.tokens for answer in answers),
            lambda: f"{sum(not answer.tokens for answer in answers)} of {len(answers)} requests have no first token",
        )

    def run(self, *requests: EngineCoreRequest) -> list[Answer]:
        """Send requests at once and wait until they have ended."""
        return self.finish(*[self.send(request) for request in requests])

    def run_at_once(self, *requests: EngineCoreRequest) -> list[Answer]:
        """Send requests so that all arrive before one of them can end. Wait until all have ended."""
        with self.stopped():
            answers = [self.send(request) for request in requests]
        return self.finish(*answers)

    def run_one(self, request: EngineCoreRequest) -> Answer:
        return self.run(request)[0]

    def wait_until(self, condition: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Take outputs until a condition holds.

        Raises:
            Broken: the engine sent nothing for `patience` seconds.
        """
        while not condition():
            if not self.take(self.patience):
                raise Broken(f"no output for {self.patience:g} s: {missing()}")

    def take(self, seconds: float) -> bool:
        """Take what the engine sends within a number of seconds. Return False if it sends nothing."""
        if not select.select([self.core.fileno()], [], [], seconds)[0]:
            return False
        for step in self.core.receive():
            self._take_step(step)
        return True

    def call(self, method: str, *args: Any) -> Any:
        """Return the result of `EngineCore.call`, or raise its error."""
        answer = self.core.call(method, *args)
        self.wait_until(answer.done, lambda: f"call {method!r} is not answered")
        return answer.result()

    def fence(self) -> None:
        """Wait until the engine has read everything that was sent so far."""
        if self.info.pooling is not None:
            self.pool(self.pooling_request(1, priority=-1000))
            return
        self.run_one(self.request(self.prompt(3), max_tokens=1))

    def await_no_problem(self, problem: Callable[[], str | None]) -> None:
        """Take steps until `problem` finds none in the statistics: only a later step may report freed blocks.

        Raises:
            Broken: there are no more steps, and the problem persists.
        """
        deadline = time.monotonic() + self.patience
        while (found := problem()) is not None:
            if not self.take(min(_LAST_STEP_SECONDS, self.patience)):
                raise Broken(found)
            expect(
                time.monotonic() < deadline, f"steps continue for {self.patience:g} s with nothing to compute: {found}"
            )

    def settle(self) -> None:
        """Clear the state of an earlier case. Raises Broken if the engine does not become idle."""
        left = [answer.id for answer in self._answers.values() if answer.finish is None]
        left += [rows.id for rows in self._rows.values() if not rows.has_ended]
        if left:
            self.core.abort_requests(left)
        self._forgotten |= self._answers.keys() | self._rows.keys()
        self._answers.clear()
        self._rows.clear()
        self.fence()
        self.steps.clear()

    def close(self) -> None:
        self.core.kill()
        self.core.close()

    # -- what must hold in every step -----------------------------------------------------------------------------

    def _take_step(self, step: EngineCoreOutputs) -> None:
        self.steps.append(step.stats)
        latest = max((self._answers[out.request_id].number for out in step.outputs if self._is_known(out)), default=0)
        for output in step.outputs:
            if self._is_known(output):
                self._take_output(self._answers[output.request_id], output, latest)
        for found in step.rows:
            if found.request_id in self._rows:
                self._rows[found.request_id].take(found, len(self.steps))
            else:
                expect(found.request_id in self._forgotten, f"rows have the unknown id {found.request_id!r}")

    def _is_known(self, output: EngineCoreOutput) -> bool:
        if output.request_id in self._answers:
            return True
        expect(output.request_id in self._forgotten, f"an output has the unknown request id {output.request_id!r}")
        return False

    def _take_output(self, answer: Answer, output: EngineCoreOutput, latest: int) -> None:
        who = f"request {answer.id}"
        if answer.aborted_at is not None:
            expect(latest < answer.aborted_at, f"{who} has output in a step with output of requests after its abort")
            answer.tokens += output.new_token_ids
            return
        expect(answer.finish is None, f"{who} has output after its end")
        expect(
            all(0 <= token < self.info.vocab_size for token in output.new_token_ids),
            f"{who} has a token outside of the vocabulary",
        )
        expect(
            (output.error is not None) == (output.finish_reason is FinishReason.ERROR),
            f"{who} must have a message exactly if it ends with an error, got finish_reason {output.finish_reason}",
        )
        self._check_logprobs(answer, output)
        if not answer.tokens:
            answer.first_step = len(self.steps)
        answer.tokens += output.new_token_ids
        answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
        answer.finish, answer.stop_reason, answer.error = output.finish_reason, output.stop_reason, output.error
        most = answer.request.sampling_params.max_tokens
        num_tokens = len(answer.request.output_token_ids) + len(answer.tokens)
        expect(most is None or num_tokens <= most, f"{who} has {num_tokens} tokens, max_tokens is {most}")

    def _check_logprobs(self, answer: Answer, output: EngineCoreOutput) -> None:
        who, params = f"request {answer.id}", answer.request.sampling_params
        if not params.wants_logprobs:
            expect(not output.logprobs, f"{who} has logprobs, which it did not ask for")
        elif output.new_token_ids:
            count = len(output.logprobs or ())
            expect(
                count == len(output.new_token_ids), f"{who} has {count} logprobs for {len(output.new_token_ids)} tokens"
            )
        answer.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            expect(answer.prompt_logprobs is None, f"{who} has its prompt_logprobs twice")
            answer.prompt_logprobs = output.prompt_logprobs

    def _load_tokenizer(self) -> ModelTokenizer:
        try:
            parts = TokenizerParts(**self.call("tokenizer"))
        except HeadraceEngineError as error:
            raise Broken(f"the call tokenizer, which every engine answers, is refused: {error}") from error
        return create_tokenizer(self.config.model.model, parts)


def differences(found: Iterable[Answer], expected: Iterable[Answer]) -> list[str]:
    """Return one sentence for each answer that differs from the expected one."""
    sentences = []
    for new, old in zip(found, expected, strict=True):
        old_tokens = old.tokens[len(new.request.output_token_ids) - len(old.request.output_token_ids) :]
        if new.tokens != old_tokens:
            place = next(
                (i for i, pair in enumerate(zip(new.tokens, old_tokens, strict=False)) if pair[0] != pair[1]),
                min(len(new.tokens), len(old_tokens)),
            )
            sentences.append(
                f"token {len(new.request.output_token_ids) + place + 1} differs "
                f"({len(new.tokens)} tokens, expected {len(old_tokens)})"
            )
        elif new.end != old.end:
            sentences.append(f"the end is {new.end}, expected {old.end}")
        elif new.error is not None:
            sentences.append(f"the request ended with an error: {new.error}")
    return sentences


def expect_same(found: Iterable[Answer], expected: Iterable[Answer], what: str) -> None:
    """Raise Broken unless the answers have the expected tokens, finish reasons and stop reasons."""
    sentences = differences(found, expected)
    expect(not sentences, f"{what}: {'; '.join(sentences[:4])}")
