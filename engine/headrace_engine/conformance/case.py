"""A case: one behaviour that every engine must have, and the claims that it depends on.

Each function in a module of cases has the decorator `@case(...)`. The table of results shows its docstring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, TypeVar

from headrace_engine.options.capabilities import EngineCapabilities

V = TypeVar("V")


class Stage(IntEnum):
    """The engine that a case runs on. Stages run in this order, so that few engines are started, one at a time."""

    PLAIN = auto()
    """Default options, 8 requests at once."""
    PLAIN_END = auto()
    """The same engine; the case ends it."""
    TIGHT = auto()
    """Few KV blocks, few tokens in a step, 4 requests at once, and priorities if the engine claims them."""
    TIGHT_END = auto()
    """The same engine; the case ends it."""
    NONE = auto()
    """No engine: the case gets the `Launcher` and starts the engines that it needs."""


class Broken(Exception):  # noqa: N818  # named for the engine, which breaks a promise
    """The engine does not behave as required."""


class DoesNotApply(Exception):  # noqa: N818
    """The case does not apply to this engine, options or model. The message says why."""


@dataclass(frozen=True, slots=True)
class NeededCapability:
    """A capability that a case depends on."""

    name: str
    holds: Callable[[EngineCapabilities], bool]


@dataclass(frozen=True, slots=True)
class Case:
    group: str
    name: str
    sentence: str
    stage: Stage
    needs: tuple[NeededCapability, ...]
    check: Callable[[Any], None]
    """Called with the `EngineUnderTest`, or with the `Launcher` in stage NONE. Raises Broken or DoesNotApply."""

    def missing_claims(self, capabilities: EngineCapabilities) -> list[str]:
        return [claim.name for claim in self.needs if not claim.holds(capabilities)]


CASES: list[Case] = []


def case(
    *needs: NeededCapability, stage: Stage = Stage.PLAIN
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a function as a case."""

    def register(check: Callable[[Any], None]) -> Callable[[Any], None]:
        CASES.append(Case(_group(check), check.__name__, _sentence(check), stage, needs, check))
        return check

    return register


def case_for_each(
    values: Sequence[V], needs: Callable[[V], Sequence[NeededCapability]], *, stage: Stage = Stage.PLAIN
) -> Callable[[Callable[[Any, V], None]], Callable[[Any, V], None]]:
    """Register a function as one case for each value. The value replaces `{}` in its docstring."""

    def register(check: Callable[[Any, V], None]) -> Callable[[Any, V], None]:
        for value in values:
            words = str(value)
            name = f"{check.__name__}[{words.replace(' ', '_')}]"

            def check_value(target: Any, value: V = value) -> None:
                check(target, value)

            sentence = _sentence(check).replace("{}", words)
            CASES.append(Case(_group(check), name, sentence, stage, tuple(needs(value)), check_value))
        return check

    return register


def expect(condition: object, sentence: str) -> None:
    """Raise Broken with the sentence unless the condition holds."""
    if not condition:
        raise Broken(sentence)


def feature(name: str) -> NeededCapability:
    """Return the claim of a boolean capability."""
    return NeededCapability(name, lambda capabilities: bool(getattr(capabilities, name)))


def stat(name: str) -> NeededCapability:
    """Return the claim that a field of `StepStats` is reported."""
    return NeededCapability(f"stats {name}", lambda capabilities: name in capabilities.stats)


def structured(kind: str) -> NeededCapability:
    """Return the claim of a kind of structured outputs."""
    return NeededCapability(f"structured_outputs {kind}", lambda capabilities: kind in capabilities.structured_outputs)


DRAWS = NeededCapability("draws", lambda capabilities: capabilities.draws is not None)
GREEDY_RESUME = NeededCapability(
    "exact_resume greedy", lambda capabilities: capabilities.exact_resume in ("greedy", "all")
)
SAMPLED_RESUME = NeededCapability("exact_resume all", lambda capabilities: capabilities.exact_resume == "all")


def limit(name: str, least: int = 1) -> NeededCapability:
    """Return the claim that a limit is at least a number."""

    def holds(capabilities: EngineCapabilities) -> bool:
        most = getattr(capabilities, name)
        return most is None or most >= least

    return NeededCapability(f"{name} of at least {least}", holds)


def _group(check: Callable[..., None]) -> str:
    return check.__module__.rpartition(".")[2]


def _sentence(check: Callable[..., None]) -> str:
    assert check.__doc__ is not None, f"{check.__name__} has no sentence"
    return " ".join(check.__doc__.split())
