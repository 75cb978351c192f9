"""Our own engine passes the suite that every engine must pass, with nothing left unclaimed.

Cases that start engines of their own are left to tests/unit/engine/test_process.py and to `make conformance`.
"""

from __future__ import annotations

import pytest

from engine.tiny_models import TinyModel
from headrace_engine.conformance.case import Stage
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.conformance.suite import Outcome, Suite

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/conformance",
    "engine/headrace_engine/core",
    "engine/headrace_engine/options/capabilities.py",
)


def test_our_own_engine_keeps_every_promise(llama: TinyModel) -> None:
    suite = Suite(Launcher(options={"model": llama.folder}))
    suite.cases = [case for case in suite.cases if case.stage is not Stage.NONE]
    found = {f"{v.case.group}.{v.case.name}": v for v in suite.run()}
    assert {name: v.reason for name, v in found.items() if v.outcome is Outcome.FAILED} == {}
    unclaimed = {name for name, v in found.items() if v.outcome is Outcome.NOT_CLAIMED}
    assert unclaimed == {"statistics.a_claimed_field_moves[phase_seconds.schedule]"}  # all phases are claimed
    doubtful = {name: v.reason for name, v in found.items() if v.outcome is Outcome.DOES_NOT_APPLY}
    ends = ("is claimed", "no limit", "speculative_config", "enable_lora and an adapter", "the model generates")
    assert all(reason.endswith(ends) for reason in doubtful.values()), doubtful
