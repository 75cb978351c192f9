"""`Preparer`: decodes bodies, renders chats, tokenises prompts and compiles grammars, in a process of `process.py`."""

import json
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from types import FrameType
from typing import Any, Final

from headrace_broker.content import loads
from headrace_broker.errors import MalformedMessageError
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.errors import InvalidRequestError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.logits_processor import load_logits_processors
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.chat_template import import_chat_templates
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_monitoring.logging import frames as frames_of
from headrace_workers.preparation.callback_rules import CallbackRules
from headrace_workers.preparation.intake import RefusedError, check_size_with_links
from headrace_workers.preparation.plain_requests import intake_of
from headrace_workers.preparation.tokenizer_answers import TokenizerAnswers

_QUICK_CPU_SECONDS: Final = 0.1
_MAX_VERDICTS: Final = 4096


class NotQuickError(BaseException):
    """The request needs the slow process. Not an `Exception`, which a chat template's error handling would catch."""


class Preparer:
    """Answers requests and tokenizer calls.

    Args:
        tokenizer: the one that `processor` uses.
        is_quick: answer `slow` if a request needs more than `_QUICK_CPU_SECONDS`.
        cpu_seconds: processor time of one request; a request that exceeds it ends the process.
    """

    def __init__(
        self,
        processor: "GrammarCachingProcessor",
        tokenizer: ModelTokenizer,
        served_names: Sequence[str],
        *,
        is_quick: bool,
        cpu_seconds: float,
        callback_rules: CallbackRules | None = None,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._processor = processor
        self._intake = intake_of(processor, tokenizer, served_names, callback_rules)
        self._tokenizer_answers = TokenizerAnswers(processor, tokenizer)
        self._quick_seconds = _QUICK_CPU_SECONDS if is_quick else None

    def answer(self, request_id: str, content_type: str, body: bytes | str, task_name: str) -> list[Any]:
        """Prepare one request. Returns the kind and the values of the answer."""
        try:
            with _within(self._cpu_seconds, self._quick_seconds):
                decoded = loads(body, content_type)
                check_size_with_links(body, decoded)
                prepared = self._intake.process(request_id, decoded, task_name)
        except MalformedMessageError as error:
            return ["undecodable", str(error)]
        except NotQuickError:
            return ["slow"]
        except RefusedError as refusal:
            return ["refused", refusal.error.code, refusal.error.message]
        except Exception as error:  # noqa: BLE001  # the request gets an answer in any case
            return ["failed", type(error).__name__, frames_of(error)]
        return ["prepared", {field.name: getattr(prepared, field.name) for field in fields(prepared)}]

    def answer_call(self, kind: str, body: bytes) -> list[Any]:
        """Answer a tokenizer call. Returns the kind and the value of the answer."""
        try:
            with _within(self._cpu_seconds, self._quick_seconds):
                return ["answered", self._tokenizer_answers.answer(kind, body)]
        except NotQuickError:
            return ["slow"]

    def learn(self, grammar: str, problem: str | None) -> None:
        """Remember another process's verdict on a grammar."""
        self._processor.remember(grammar, problem)


class GrammarCachingProcessor(InputProcessor):
    """Checks requests with a cache of verdicts on grammars.

    Args:
        is_quick: compile no grammar, and raise `NotQuickError` if the verdict is not known.
        tell: called with each grammar that was compiled here, and the problem with it, or None.
    """

    def __init__(self, *args: Any, is_quick: bool, tell: Callable[[str, str | None], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_quick = is_quick
        self._tell = tell
        self._verdicts: OrderedDict[str, str | None] = OrderedDict()

    def remember(self, grammar: str, problem: str | None) -> None:
        self._verdicts[grammar] = problem
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def check_grammar(self, params: SamplingParams) -> None:
        if params.structured_outputs is None:
            return
        grammar = json.dumps(asdict(params.structured_outputs))
        if self._is_quick:
            if grammar not in self._verdicts:
                raise NotQuickError
            self._verdicts.move_to_end(grammar)
            problem = self._verdicts[grammar]
        else:
            problem = None
            try:
                super().check_grammar(params)  # the engine's grammar checker caches this
            except InvalidRequestError as error:
                problem = str(error)
            self._tell(grammar, problem)
        if problem is not None:
            raise InvalidRequestError(problem)


def make_preparer(
    settings: dict[str, Any], tokenizer: ModelTokenizer, tell: Callable[[str, str | None], None]
) -> Preparer:
    """Make a preparer from the settings that `Preparation.configure` sends, and handle the signal of its timer.

    Args:
        tell: see `GrammarCachingProcessor`.
    """
    signal.signal(signal.SIGVTALRM, _not_quick)
    model_info = ModelInfo.from_wire(settings["model_info"])
    tokenizer.refuse_longer_than(model_info.max_model_len)
    import_chat_templates()  # now, so that the first chat does not wait for the import
    tokenizer.learn_history_forms()  # now: the first such chat may take 0.1 s longer, more than a quick process has
    processor = GrammarCachingProcessor(
        model_info,
        tokenizer,
        logits_processors=load_logits_processors(settings["logits_processors"]),
        engine=settings["engine"],
        capabilities=EngineCapabilities.from_wire(settings["capabilities"]),
        is_quick=settings["is_quick"],
        tell=tell,
    )
    return Preparer(
        processor,
        tokenizer,
        settings["served_names"],
        is_quick=settings["is_quick"],
        cpu_seconds=settings["cpu_seconds"],
        callback_rules=CallbackRules(*map(tuple, settings["callback_rules"])),
    )


@contextmanager
def _within(seconds: float, quick_seconds: float | None) -> Iterator[None]:
    """Limit the processor time of one request. Raises NotQuickError after `quick_seconds`."""
    global _is_timed  # a signal handler takes no arguments of ours
    signal.setitimer(signal.ITIMER_PROF, seconds)  # not caught: ends the process
    if quick_seconds is not None:
        _is_timed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, quick_seconds)
    try:
        yield
    finally:
        _is_timed = False  # first, as the signal may be pending
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


_is_timed = False


def _not_quick(_signal: int, _frame: FrameType | None) -> None:
    if _is_timed:
        raise NotQuickError
