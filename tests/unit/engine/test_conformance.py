"""The conformance suite passes an engine that keeps its promises, and fails one that breaks any of them.

The engine is a small one in pure Python (`small_engine`), found through an entry point as a stranger's is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.conformance import __main__ as command
from headrace_engine.conformance.case import CASES, Stage
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.conformance.suite import Outcome, Suite, Verdict
from unit.engine.small_engine import FAULTS

pytestmark = pytest.mark.rotated("engine/headrace_engine/conformance", "tests/unit/engine/small_engine")

_ENTRY_POINTS = "[headrace.engines]\nsmall = unit.engine.small_engine:ENGINE\n"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the small engine for this process and its children."""
    metadata = tmp_path / "small-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: small\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    tests = Path(__file__).parents[2]
    paths = [str(tmp_path), str(tests), str(tests.parent / "engine"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(str(tmp_path))


def verdicts(fault: str = "", *words: str, patience: float = 60.0, end_patience: float = 30.0) -> list[Verdict]:
    options: dict[str, Any] = {"model": "small", "engine": "small", "engine_args": {"fault": fault} if fault else {}}
    return list(Suite(Launcher(options=options, patience=patience, end_patience=end_patience), words).run())


def failures(found: list[Verdict]) -> dict[str, str]:
    return {f"{v.case.group}.{v.case.name}": v.reason for v in found if v.outcome is Outcome.FAILED}


def test_an_engine_that_keeps_its_promises_passes() -> None:
    found = verdicts()
    assert failures(found) == {}
    assert sorted(verdict.case.name for verdict in found) == sorted(case.name for case in CASES)
    passed = {verdict.case.group for verdict in found if verdict.outcome is Outcome.PASSED}
    assert passed == {case.group for case in CASES} - {"structure", "pooling"}  # the small engine generates


def test_what_is_not_claimed_is_listed_with_what_is_missing() -> None:
    found = verdicts("", "the_text_has_its_form", "every_claimed_kind", "preemptions_are_counted")
    assert {verdict.outcome for verdict in found} == {Outcome.NOT_CLAIMED}
    reasons = {verdict.reason for verdict in found}
    assert {"structured_outputs json", "stats preemptions", "structured_outputs"} <= reasons


# What an engine may break, and what it must fail then of the cases that hold the word.
BROKEN = [
    ("batch_draws", "draws_are_independent", {"sampling.draws_are_independent_of_the_batch"}),
    ("claims_what_no_request_can_ask_for", "claimed_fields", {"statistics.claimed_fields_exist"}),
    ("dies_of_a_long_prompt", "too_long", {"refusals.a_prompt_that_is_too_long_is_an_error"}),
    ("doubled_token", "max_tokens_ends", {"endings.max_tokens_ends_with_length"}),
    ("doubled_token", "chunked_prompts_change", {"pressure.chunked_prompts_change_no_token"}),
    ("end_token_as_stop_reason", "without_a_stop_reason", {"endings.an_end_token_ends_without_a_stop_reason"}),
    ("equal_seeds", "other_seeds", {"sampling.other_seeds_give_other_draws"}),
    ("ignores_priority", "smaller_priority", {"admission.the_smaller_priority_is_served_first"}),
    ("keeps_aborted", "running_request_stops", {"aborts.a_running_request_stops"}),
    ("keeps_aborted", "waiting_request_never", {"aborts.a_waiting_request_never_starts"}),
    ("loses_stop_token", "a_stop_token_ends", {"endings.a_stop_token_ends_with_its_id"}),
    (
        "min_tokens_from_the_resume",
        "[min_tokens_and",
        {"resume.a_cut_request_goes_on_as_if_it_were_whole[min_tokens_and_the_end_token]"},
    ),
    ("no_error_for_an_adapter", "adapter_is_an_error", {"refusals.an_adapter_is_an_error_where_none_are_served"}),
    ("order_backwards", "first_come", {"admission.first_come_first_served"}),
    ("processed_logprobs", "models_own", {"logprobs.values_are_the_models_own"}),
    (
        "prompt_logprobs_again",
        "[prompt_logprobs]",
        {"resume.a_cut_request_goes_on_as_if_it_were_whole[prompt_logprobs]"},
    ),
    ("resumes_ended", "had_ended_is_answered", {"resume.an_attempt_that_had_ended_is_answered_at_once"}),
    (
        "resumes_prompt",
        "penalty]",
        {
            "resume.a_cut_request_goes_on_as_if_it_were_whole[presence_penalty]",
            "resume.a_cut_request_goes_on_as_if_it_were_whole[frequency_penalty]",
        },
    ),
    ("resumes_prompt", "under_pressure_is_exact_for_greedy", {"pressure.a_resume_under_pressure_is_exact_for_greedy"}),
    ("serves_less_than_it_claims", "max_logit_bias:", {"refusals.more_than_the_limit_is_refused[max_logit_bias]"}),
    ("sends_emitted", "emitted_tokens_are_not", {"resume.emitted_tokens_are_not_sent_again"}),
    (
        "starts_with_any_option",
        "a_wrong_option",
        {
            "faults.a_wrong_option_keeps_it_from_starting[max_model_len]",
            "faults.a_wrong_option_keeps_it_from_starting[model]",
        },
    ),
    ("wrong_rank", "greedy_draws_rank", {"logprobs.greedy_draws_rank_first"}),
]
SLOW_TO_FAIL = [
    ("cold_statistics", "[running]", {"statistics.a_claimed_field_moves[running]"}),
    ("leaks_blocks", "[kv_blocks_used]", {"statistics.a_claimed_field_moves[kv_blocks_used]"}),
    ("ignores_stop", "shutdown_ends", {"faults.shutdown_ends_in_time"}),
    ("survives_its_parent", "parents_end", {"faults.the_parents_end_ends_it"}),
    ("unanswered_call", "unknown_call", {"calls.an_unknown_call_is_refused"}),
]


@pytest.mark.parametrize(("fault", "word", "expected"), BROKEN)
def test_an_engine_that_breaks_a_promise_fails(fault: str, word: str, expected: set[str]) -> None:
    assert set(failures(verdicts(fault, word))) == expected


@pytest.mark.parametrize(("fault", "word", "expected"), SLOW_TO_FAIL)
def test_an_engine_that_does_not_do_something_in_time_fails(fault: str, word: str, expected: set[str]) -> None:
    assert set(failures(verdicts(fault, word, patience=3.0, end_patience=1.0))) == expected


def test_every_fault_of_the_small_engine_is_found() -> None:
    assert {fault for fault, _, _ in BROKEN + SLOW_TO_FAIL} == FAULTS


def test_an_engine_that_died_in_one_case_is_started_again_for_the_next() -> None:
    found = verdicts("dies_of_a_long_prompt", "refusals")
    assert set(failures(found)) == {"refusals.a_prompt_that_is_too_long_is_an_error"}
    assert "ended, exit status 1" in failures(found)["refusals.a_prompt_that_is_too_long_is_an_error"]


def test_the_command_prints_a_table_and_says_by_its_status_whether_all_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--engine", "small", "--model", "small", "--only", "max_tokens_ends", "the_text_has_its_form"]
    assert command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("passed") and "max_tokens=7 gives 7 tokens" in lines[0]
    assert any(line.startswith("not claimed") for line in lines)
    assert lines[-1].split() == ["all", "1", "0", "5", "0"]
    assert command.main([*arguments, "--engine-args", '{"fault": "doubled_token"}']) == 1
    assert "failed: endings.max_tokens_ends_with_length" in capsys.readouterr().out


def test_the_command_prints_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engine", "small", "--model", "small", "--only", "max_tokens_ends", "--json"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["engine"] == "small" and found["capabilities"]["draws"] == "small"
    assert found["counts"]["passed"] == 1
    assert [case["outcome"] for case in found["cases"]] == ["passed"]
    assert printed.err.startswith("passed")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", "nobody", "--model", "small"], "engine must be one of headrace, small, vllm, got 'nobody'"),
        (["--engine", "small", "--model", "large"], "model is large"),
        (["--engine", "small", "--model", "small", "--only", "no such words"], "no case holds no such words"),
    ],
)
def test_the_command_says_why_it_cannot_run(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_every_case_has_a_sentence_and_a_name_of_its_own() -> None:
    names = [f"{case.group}.{case.name}" for case in CASES]
    assert len(names) == len(set(names))
    assert all(case.sentence.endswith(".") for case in CASES)
    assert {case.stage for case in CASES} == set(Stage)


def test_the_suite_needs_no_test_framework_and_no_torch() -> None:
    program = "import sys, headrace_engine.conformance.__main__; print(*{n.partition('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint({"pytest", "hypothesis", "torch"})
