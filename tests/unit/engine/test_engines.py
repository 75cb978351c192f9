"""An engine of another package: how it is found, what its child gets and tells, and every way in which it cannot be."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.api.llm_engine import LLMEngine, start_core
from headrace_engine.core.frames import PROTOCOL, protocol_problem
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import ConfigError, EngineDeadError, ModelLoadError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import AsyncEngineArgs, EngineArgs
from headrace_engine.options.engines import find_engine
from headrace_engine.requests.request import FinishReason
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.system import interpreter
from unit.engine import fake_engine
from unit.engine.fake_runner import fake_config
from unit.engine.requests import core_request

Start = Callable[..., EngineCoreProcess]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tests_on_path: None) -> None:
    fake_engine.offer(monkeypatch, "unit.engine.fake_engine:ENGINE")


@pytest.fixture
def start(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts children of the fake engine, in a home of their own; all are gone afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    children: list[EngineCoreProcess] = []

    def start_child(**options: Any) -> EngineCoreProcess:
        config = EngineArgs(model="m", engine="fake", **options).create_engine_config()
        children.append(EngineCoreProcess(config))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()
        child.close()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("environment") / "bare"
    venv.create(folder, symlinks=True, with_pip=False)
    return str(folder / "bin" / "python")


def ask(core: EngineCoreProcess, method: str, *args: Any) -> Any:
    answer = core.call(method, *args)
    core.wait(answer)
    return answer.result()


def config_error(**options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        EngineArgs(model="m", **options).create_engine_config()
    return str(refused.value)


def test_our_own_engine_is_found_though_no_metadata_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.offer(monkeypatch)
    assert find_engine("headrace").child_module == "headrace_engine.core.child"


def test_an_engine_of_an_installed_package_is_found_by_its_entry_point(tmp_path: Path, tests_on_path: None) -> None:
    installed = tmp_path / "fake_engine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[headrace.engines]\nfake = unit.engine.fake_engine:ENGINE\n")
    program = "from headrace_engine.options.engines import find_engine; print(find_engine('fake').install_command)"
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == "pip install fake-engine"


def test_an_unknown_engine_is_refused_with_the_names_of_those_that_are_installed(installed: None) -> None:
    expected = "engine must be one of fake, headrace, got 'vlm'; install the package that has it"
    assert expected in config_error(engine="vlm")


def test_an_engine_of_two_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.offer(monkeypatch, "unit.engine.fake_engine:ENGINE", "other:ENGINE")
    assert "offered by several packages: other:ENGINE, unit.engine.fake_engine:ENGINE" in config_error(engine="fake")


def test_one_package_that_is_found_twice_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.offer(monkeypatch, *["unit.engine.fake_engine:ENGINE"] * 2)
    assert find_engine("fake") is fake_engine.ENGINE


@pytest.mark.parametrize("value", ["gone_package:ENGINE", "unit.engine.fake_engine:MOTOR"])
def test_an_engine_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    fake_engine.offer(monkeypatch, value)
    assert f"engine 'fake' cannot be imported from {value}: " in config_error(engine="fake")


def test_options_are_judged_by_the_engine_that_they_are_for(installed: None) -> None:
    args: dict[str, Any] = {"dtype": "float16", "device": "tpu", "quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}
    config = EngineArgs(model="m", engine="fake", **args).create_engine_config()
    assert (config.model.dtype, config.model.device, config.cache.kv_cache_dtype) == ("float16", "tpu", "fp8_e5m2")
    assert "quantization is int8, allowed is fp8" in config_error(engine="fake", quantization="int8")
    assert "dtype must be one of auto, float32, bfloat16, got 'float16'" in config_error(**args)


def test_what_no_engine_can_have_is_refused_for_another_too(installed: None) -> None:
    wrong: dict[str, Any] = {"engine_args": {"x": {1}}, "max_num_seqs": 0, "speculative_config": "ngram", "device": 5}
    problems = config_error(engine="fake", **wrong)
    for part in (
        "engine_args must be a map of JSON's values, got {'x': {1}}",
        "max_num_seqs must be an integer of at least 1, got 0",
        "speculative_config must be a map of JSON's values, got 'ngram'",
        "device must be text that is not empty, got 5",
    ):
        assert part in problems
    assert "engine must be text that is not empty, got 5" in config_error(engine=5)


def test_our_own_engine_takes_no_other_options() -> None:
    assert "engine_args must be empty with engine headrace, got gpu_share" in config_error(
        engine_args={"gpu_share": 0.5}
    )


def test_a_child_gets_its_options_and_its_environment(start: Start) -> None:
    drafts = {"method": "eagle", "num_speculative_tokens": 40}
    core = start(engine_args={"gpu_share": 0.5}, speculative_config=drafts, dtype="half")
    config = EngineConfig.from_wire(ask(core, "config"))
    assert (config.engine_args, config.speculative, config.speculative_options) == ({"gpu_share": 0.5}, None, drafts)
    assert config.model.dtype == "half"
    assert config.scheduler.max_num_batched_tokens == 0  # nobody has named one
    assert ask(core, "variable", "FAKE_ENGINE_MODEL") == "m"


def test_capabilities_arrive_with_the_first_frame(start: Start) -> None:
    core = start()
    core.wait_ready(20)
    assert core.capabilities == fake_engine.CAPABILITIES


def test_a_child_tells_how_much_of_its_model_is_loaded(start: Start) -> None:
    core = start(engine_args={"loads_slowly": True})
    assert core.load_progress == 0.0
    core.wait_ready(20)
    assert core.load_progress == 0.5


def test_a_child_of_another_engine_serves_requests(start: Start) -> None:
    core = start()
    core.wait_ready(20)
    core.add_request(core_request("a", [5, 6]))
    first, last = core.get_outputs(), core.get_outputs()
    assert first is not None and first.outputs[0].new_token_ids == [5]
    assert last is not None and last.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("code", ["import no_such_package", "raise RuntimeError('it is built for another one')", None])
def test_a_child_that_cannot_be_imported_is_told_as_what_no_retry_can_mend(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: str | None
) -> None:
    if code is not None:
        (tmp_path / "broken_child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(fake_engine.FakeEngine, "child_module", "broken_child")
    with pytest.raises(ConfigError, match="-m broken_child failed before it could say why") as caught:
        start().wait_ready(20)
    assert "pip install fake-engine" in str(caught.value)
    assert (code or "No module named broken_child") in capfd.readouterr().err


def test_the_library_runs_another_engine_in_a_child(start: Start) -> None:
    with LLMEngine.from_engine_args(EngineArgs(model="m", engine="fake"), core_in_process=True) as engine:
        assert isinstance(engine._core, EngineCoreProcess)
        engine.add_request("a", {"prompt_token_ids": [12, 13]}, SamplingParams(max_tokens=2))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs[0].text == "bc"


def test_the_library_runs_another_interpreter_in_a_child(
    start: Start, bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(fake_config(), engine_python=bare_python)
    monkeypatch.setattr(EngineCoreProcess, "wait_ready", lambda _: None)
    core = start_core(config, in_process=True)
    assert isinstance(core, EngineCoreProcess)
    core.kill()
    core.close()


def test_another_engine_is_not_run_in_this_process_on_demand(installed: None) -> None:
    args = AsyncEngineArgs(model="m", engine="fake", core_in_process=True)
    with pytest.raises(ConfigError, match="core_in_process is set, but another engine or interpreter runs in"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        ({"exact_resume": "mostly"}, "exact_resume must be one of none, greedy, all, got 'mostly'"),
        ({"structured_outputs": ["xml"]}, r"structured_outputs must be of json, regex, .*, got \['xml'\]"),
        ({"telepathy": True}, "telepathy is not known"),
    ],
)
def test_capabilities_that_mean_nothing_here_are_refused(wire: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineCapabilities.from_wire(wire)


def test_an_engine_that_tells_nothing_can_do_nothing() -> None:
    nothing = EngineCapabilities()
    assert (nothing.draws, nothing.exact_resume, nothing.lora, nothing.structured_outputs) == (None, "none", False, ())


def test_an_older_child_is_refused(start: Start) -> None:
    with pytest.raises(
        ConfigError, match=f"speaks protocol {PROTOCOL - 1}, its parent {PROTOCOL}: the engine is older"
    ):
        start(engine_args={"is_older": True}).wait_ready(20)


def test_each_side_is_named_when_it_is_the_older_one() -> None:
    assert protocol_problem(PROTOCOL) is None
    for engine, older in ((PROTOCOL - 1, "the engine is older"), (PROTOCOL + 1, "the parent is older")):
        assert older in str(protocol_problem(engine))
    assert "the engine is older" in str(protocol_problem(None))  # before protocols had a number


def test_a_child_refuses_an_older_parent(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_engine.core.process.PROTOCOL", PROTOCOL - 1)
    with pytest.raises(ConfigError, match=f"speaks protocol {PROTOCOL}, its parent {PROTOCOL - 1}"):
        start().wait_ready(20)


@pytest.mark.parametrize(
    ("failure", "error", "sentence"),
    [
        ("ValueError", ConfigError, "gpu_share is 2, must be at most 1"),
        ("OSError", ModelLoadError, "there is no config.json"),
        ("no device", EngineDeadError, "RuntimeError: no device"),
    ],
)
def test_what_fails_at_the_start_arrives_as_what_it_is(
    start: Start, failure: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        start(engine_args={"fails_with": failure}).wait_ready(20)


def test_a_child_without_its_parts_says_in_one_sentence_what_installs_them(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as refused:
        start(engine_args={"fails_with": "no part"}).wait_ready(20)
    assert str(refused.value) == (
        f"engine fake cannot import its parts with {sys.executable} "
        "(ModuleNotFoundError: No module named 'a_package_that_nobody_has'): install them there by "
        "pip install fake-engine, or give the interpreter that has them as engine_python"
    )
    assert "Traceback" not in caplog.text + capfd.readouterr().err


@pytest.mark.parametrize("rank_start", ["start_rank", "fork_rank"])
@pytest.mark.parametrize("end", ["kill", "shutdown", "crash"])
def test_what_a_child_has_started_ends_with_it(start: Start, end: str, rank_start: str) -> None:
    core = start()
    core.wait_ready(20)
    rank = os.pidfd_open(ask(core, rank_start))  # readable when the process has ended
    assert not select.select([rank], [], [], 0)[0]
    if end == "kill":
        core.kill()
    elif end == "shutdown":
        core.shutdown()
    else:
        with pytest.raises(EngineDeadError, match="exit status 3"):
            ask(core, "exit", 3)
    assert select.select([rank], [], [], 20)[0]
    os.close(rank)


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "true", "cat", "yes", __file__])
def test_a_wrong_interpreter_is_refused_before_anything_starts(installed: None, python: str) -> None:
    problem = config_error(engine="fake", engine_python=python)
    assert problem.startswith("engine_python ") and repr(python) in problem


def test_a_program_that_never_ends_is_refused_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "_PROBE_SECONDS", 0.2)
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nsleep 600 &\nwait\n")  # which holds the pipe, too
    sleeper.chmod(0o700)
    assert config_error(engine_python=str(sleeper)) == f"engine_python must be a Python interpreter, got '{sleeper}'"


def test_an_interpreter_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python2"
    old.write_text("#!/bin/sh\necho '[[2, 7], null, false]'\n")
    old.chmod(0o700)
    assert (
        config_error(engine_python=str(old)) == f"engine_python must be at least Python 3.11, got '{old}', Python 2.7"
    )


def test_our_own_interpreter_needs_no_links() -> None:
    assert not interpreter.is_other(None)
    assert not interpreter.is_other(sys.executable)


def test_another_interpreter_imports_our_packages_and_nothing_is_left(
    start: Start, bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    core, second = start(engine_python=bare_python), start(engine_python=bare_python)
    core.wait_ready(20)
    second.wait_ready(20)
    parts = tmp_path / "cache" / "headrace" / "engine-parts"
    assert len(list(parts.iterdir())) == 2
    found = ask(core, "imported", "headrace_engine", "msgpack")
    assert {Path(file).parents[2] for file in found.values()} == {parts}
    assert ask(core, "variable", "PYTHONPATH").startswith(str(parts))
    core.add_request(core_request("a", [5]))
    assert core.get_outputs() is not None
    for child in (core, second):
        child.kill()
        child.close()
    assert list(parts.iterdir()) == []
    assert Path(fake_engine.__file__).exists()  # a link was removed, not what it names


def test_links_that_a_killed_process_left_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = (
        "from headrace_engine.system.interpreter import LinkedPackages; import os, signal\n"
        "links = LinkedPackages(['msgpack']); print(links.folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert (left / "msgpack").is_symlink()
    mine, other = interpreter.LinkedPackages(["msgpack"]), interpreter.LinkedPackages(["msgpack", "no_such_package"])
    assert not left.exists()
    assert {path.name for path in other.folder.iterdir()} == {"msgpack"}
    assert mine.folder.exists()  # a process that lives keeps its own
    for links in (mine, other):
        links.remove()
        links.remove()
    assert list(left.parent.iterdir()) == []


def test_a_process_that_ends_leaves_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "from headrace_engine.system.interpreter import LinkedPackages; links = LinkedPackages(['msgpack'])"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list((tmp_path / "headrace" / "engine-parts").iterdir()) == []


def test_an_interpreter_with_a_msgpack_of_its_own_and_another_python_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"with": "true", "without": "false"}
    for name, has_msgpack in answers.items():
        python = tmp_path / name
        python.write_text(f"#!/bin/sh\necho '[[3, 99], \"cpython-399\", {has_msgpack}]'\n")
        python.chmod(0o700)
    assert not interpreter.check(str(tmp_path / "with"))
    assert interpreter.check(str(tmp_path / "without"))


def test_a_start_that_fails_gives_its_pipes_and_links_back(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_python: str
) -> None:
    config = EngineArgs(model="m", engine="fake", engine_python=bare_python).create_engine_config()
    gone = replace(config, engine_python=str(tmp_path / "gone"))
    monkeypatch.setattr(interpreter, "check", lambda _: True)  # it was there when the options were checked
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        EngineCoreProcess(gone)
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert list((tmp_path / "cache" / "headrace" / "engine-parts").iterdir()) == []
