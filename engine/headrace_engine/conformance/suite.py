"""Runs the cases on an engine, stage by stage, and returns a verdict for each."""

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from headrace_engine.conformance import (  # noqa: F401  # their import registers the cases
    aborts,
    admission,
    calls,
    endings,
    faults,
    logprobs,
    pooling,
    pressure,
    refusals,
    resume,
    sampling,
    statistics,
    structure,
)
from headrace_engine.conformance.case import CASES, Broken, Case, DoesNotApply, Stage
from headrace_engine.conformance.driver import Answer, EngineUnderTest
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.errors import ConfigError, HeadraceEngineError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.runner.contracts import ModelInfo

logger = logging.getLogger(__name__)


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_CLAIMED = "not claimed"
    """The engine does not claim the feature of the case."""
    DOES_NOT_APPLY = "does not apply"
    """The case does not apply to this engine, model or these options."""


@dataclass(frozen=True, slots=True)
class Verdict:
    case: Case
    outcome: Outcome
    reason: str
    """The reason if the case was broken, not claimed, or does not apply. Empty if it passed."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.case.group,
            "name": self.case.name,
            "sentence": self.case.sentence,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
        }


class Suite:
    """One run on one engine.

    Args:
        launcher: starts the engines.
        words: run only cases whose group, name or sentence contains one of them. Empty: all cases.
    """

    def __init__(self, launcher: Launcher, words: Sequence[str] = ()) -> None:
        self._launcher = launcher
        searched = [(case, f"{case.group} {case.name} {case.sentence}".lower()) for case in CASES]
        found = [case for case, text in searched if not words or any(word.lower() in text for word in words)]
        self.cases = sorted(found, key=lambda case: case.stage)
        self.info: ModelInfo | None = None
        self.capabilities = EngineCapabilities()
        self._engine: EngineUnderTest | None = None
        self._is_tight = False
        self._tight_claims: EngineCapabilities | None = None
        self._tight_problem: str | None = None
        """Why there is no tight engine. It is tried only once."""
        self._references: list[Answer] = []
        self._blocks_of_a_request = 0

    def run(self) -> Iterator[Verdict]:
        """Run the cases one by one.

        Raises:
            ConfigError, ModelLoadError, EngineDeadError, TimeoutError: the engine does not start with the plain
            options.
            Broken: the engine starts, but fails in something that every case needs.
        """
        try:
            self._start_plain()
            for case in self.cases:
                missing = case.missing_claims(self._claims_at(case.stage))
                if missing:
                    yield Verdict(case, Outcome.NOT_CLAIMED, ", ".join(missing), 0.0)
                else:
                    yield self._verdict(case)
        finally:
            self._close()

    # -- engines --------------------------------------------------------------------------------------------------

    def _start_plain(self) -> EngineUnderTest:
        self._close()
        self._engine = engine = self._launcher.start()
        self._is_tight = False
        first = self.info is None
        self.info, self.capabilities = engine.info, engine.capabilities
        if first and not self._pools and any(case.stage is Stage.TIGHT for case in self.cases):
            try:
                self._make_references(engine)
            except (Broken, HeadraceEngineError) as error:
                self._tight_problem = f"with plenty of KV blocks: {error}"
                return self._start_plain()
        return engine

    def _make_references(self, engine: EngineUnderTest) -> None:
        """Compute the answers that the tight engine must give, and the number of KV blocks of the longest request."""
        self._references = engine.run(*pressure.long_requests(engine))
        engine.settle()
        # It must run for several steps: if it ended in its first step, its blocks might be reported as free again.
        engine.run_one(engine.request(engine.prompt(engine.info.max_model_len - 8), max_tokens=None))
        used = max(step.kv_blocks_used for step in engine.steps)
        # If the engine does not report the blocks in use, assume blocks of 16 tokens.
        self._blocks_of_a_request = used or -(-engine.info.max_model_len // 16)
        engine.settle()

    def _start_tight(self) -> EngineUnderTest:
        """Start an engine with the smallest limits that its options allow."""
        self._close()
        if self._tight_problem is not None:
            raise Broken(self._tight_problem)
        try:
            self._engine = engine = self._launch_smallest()
        except (HeadraceEngineError, TimeoutError) as error:
            self._tight_problem = f"with few KV blocks the engine does not start: {error}"
            raise Broken(self._tight_problem) from error
        self._is_tight, self._tight_claims = True, engine.capabilities
        engine.references = self._references
        return engine

    def _launch_smallest(self) -> EngineUnderTest:
        order: dict[str, Any] = {"scheduling_policy": "priority"}
        memory = {"num_blocks": 2 * self._blocks_of_a_request + 1}
        budget = {"max_num_batched_tokens": pressure.TOKENS_A_STEP}
        least = {"max_num_seqs": pressure.MAX_NUM_SEQS}
        for more in (order | memory | budget, order | memory, order | budget, order, memory | budget, memory, budget):
            try:
                return self._launcher.start(**least, **more)
            except ConfigError as error:
                logger.info("the engine does not take %s: %s", more, error)
        return self._launcher.start(**least)

    @property
    def _pools(self) -> bool:
        """Whether the model computes one row for each input, so that only the cases of pooling apply."""
        return self.info is not None and self.info.pooling is not None

    def _claims_at(self, stage: Stage) -> EngineCapabilities:
        """Return the claims of the engine that a stage uses. They may depend on the options of the engine."""
        if stage is not Stage.TIGHT or self._pools:
            return self.capabilities
        if self._tight_claims is None and self._tight_problem is None:
            with contextlib.suppress(Broken):  # each case of the stage will fail with this error
                self._start_tight()
        return self._tight_claims or self.capabilities

    def _engine_for(self, stage: Stage) -> EngineUnderTest:
        """Return the running engine, or start one if there is none or the stage needs another."""
        if stage is Stage.TIGHT:
            return self._engine if self._engine is not None and self._is_tight else self._start_tight()
        return self._engine or self._start_plain()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # -- cases ----------------------------------------------------------------------------------------------------

    def _verdict(self, case: Case) -> Verdict:
        started = time.monotonic()
        outcome, reason = Outcome.PASSED, ""
        try:
            self._check(case)
        except DoesNotApply as error:
            outcome, reason = Outcome.DOES_NOT_APPLY, str(error)
        except (Broken, TimeoutError, HeadraceEngineError) as error:
            outcome, reason = Outcome.FAILED, str(error)
            self._close()  # its state is unknown
        except Exception as error:  # an engine under test may send anything
            outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
            logger.debug("case %s failed", case.name, exc_info=True)
            self._close()
        return Verdict(case, outcome, reason, time.monotonic() - started)

    def _check(self, case: Case) -> None:
        if self._pools != (case.group == "pooling"):
            raise DoesNotApply("the model does not generate" if self._pools else "the model generates")
        if case.stage is Stage.NONE:
            self._close()
            case.check(self._launcher)
            return
        engine = self._engine_for(case.stage)
        try:
            case.check(engine)
        except DoesNotApply:
            engine.settle()
            raise
        if case.stage in (Stage.PLAIN_END, Stage.TIGHT_END):
            self._close()
        else:
            engine.settle()


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return the number of verdicts by the name of their outcome."""
    found = [verdict.outcome for verdict in verdicts]
    return {outcome.value: found.count(outcome) for outcome in Outcome}


def report(suite: Suite, verdicts: Sequence[Verdict], engine: str) -> dict[str, Any]:
    """Return the results of the run as plain data for JSON."""
    return {
        "engine": engine,
        "model_info": asdict(suite.info) if suite.info is not None else None,
        "capabilities": suite.capabilities.to_wire(),
        "counts": count(verdicts),
        "cases": [verdict.to_json() for verdict in verdicts],
    }
