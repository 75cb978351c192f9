"""Adapters in the core: who gets a place in a batch, when one is loaded, dropped or replaced, and who waits."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.grammars import PreparedRequest
from headrace_engine.errors import ConfigError, InvalidRequestError, LoRACapacityError, LoRAError
from headrace_engine.options.config import LoRAConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request, load_at_once


def make_core(
    loaded: str = "",
    *,
    max_loras: int = 2,
    max_cpu_loras: int = 3,
    caps: RunnerCapabilities | None = None,
    **options: Any,
) -> tuple[EngineCore, FakeRunner]:
    lora = LoRAConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras, preload=options.pop("preload", []))
    runner = FakeRunner(caps=caps or RunnerCapabilities(lora=True), max_adapters=max_loras)
    core = EngineCore(fake_config(lora=lora, **options), runner)
    assert core.loras is not None
    load_at_once(core.loras)
    for name in loaded:
        add(core, name)
    return core, runner


def adapter(name: str, path: str | None = None, **more: Any) -> LoRARequest:
    return LoRARequest(name, lora_path=path if path is not None else f"/{name}", **more)


def add(core: EngineCore, name: str, **more: Any) -> bool:
    added: bool = core.call("add_lora", adapter(name, **more).to_wire()).result()
    return added


def prompts(names: str, **params: Any) -> list[EngineCoreRequest]:
    """A request for each letter, with the adapter of that name; a dot is one without."""
    params = {"max_tokens": 4, "ignore_eos": True, **params}
    return [
        core_request(f"{index}{name}", range(20, 30), lora=None if name == "." else name, **params)
        for index, name in enumerate(names)
    ]


def run(core: EngineCore, messages: list[EngineCoreRequest]) -> Results:
    for message in messages:
        core.add_request(message)
    results = Results().drain(core)
    assert results.tokens == {message.request_id: tokens_alone(message) for message in messages}
    return results


def adapters_of_steps(runner: FakeRunner) -> list[set[str]]:
    """The names after the first character of the requests' ids, by step."""
    return [{request_id[1:] for request_id in batch.num_scheduled_tokens} for batch in runner.batches]


def test_requests_with_several_adapters_and_without_share_a_step_and_no_block() -> None:
    core, runner = make_core("ab")
    results = run(core, prompts("a.b"))
    assert adapters_of_steps(runner)[0] == {"a", ".", "b"}
    assert results.hit_tokens == 0
    assert len(set(map(tuple, results.tokens.values()))) == 3


def test_the_same_adapter_shares_blocks() -> None:
    core, _ = make_core()
    run(core, prompts("a"))
    results = run(core, [core_request("again", range(20, 30), lora="a", max_tokens=4, ignore_eos=True)])
    assert results.hit_tokens == 8


def test_an_adapter_that_was_read_again_shares_no_block_with_what_it_was() -> None:
    core, _ = make_core()
    run(core, prompts("a"))
    assert add(core, "a", load_inplace=True)
    results = run(core, [core_request("again", range(20, 30), lora="a", max_tokens=4)])
    assert results.hit_tokens == 0


def test_no_more_adapters_than_max_loras_share_a_step_and_others_pass() -> None:
    core, runner = make_core("ab", max_loras=1)
    run(core, prompts("ab.a"))
    assert adapters_of_steps(runner)[0] == {"a", "."}
    order = [arrival.request_id for batch in runner.batches for arrival in batch.new_requests]
    assert order == ["0a", "2.", "3a", "1b"]


def test_a_request_whose_adapter_has_no_place_is_passed_only_so_often() -> None:
    core, runner = make_core("ab", max_loras=1, max_num_seqs=2)
    # of lengths that overlap, so that `a` would always have a request that runs
    flood = [
        core_request(f"{i}{n}", [5, i], lora=n, max_tokens=3 + i % 4, ignore_eos=True)
        for i, n in enumerate("ab" + "a" * 20)
    ]
    run(core, flood)
    order = [arrival.request_id for batch in runner.batches for arrival in batch.new_requests]
    assert order.index("1b") == 3  # as many as run at once have passed it: 2a and 3a


@pytest.mark.parametrize(
    ("policy", "order"),
    [("priority", ["first", "plain", "urgent", "later"]), ("fcfs", ["first", "later", "plain", "urgent"])],
)
def test_nobody_with_an_adapter_passes_a_more_urgent_request_under_the_priority_policy(
    policy: str, order: list[str]
) -> None:
    core, runner = make_core("ab", max_loras=1, policy=policy)
    first = core_request("first", range(20, 30), lora="a", max_tokens=8, ignore_eos=True)
    results = Results()
    core.add_request(first)
    results.step(core)
    core.add_request(core_request("urgent", range(20, 30), lora="b", priority=1, max_tokens=2))
    core.add_request(core_request("later", range(20, 30), lora="a", priority=5, max_tokens=2))
    core.add_request(core_request("plain", range(20, 30), priority=5, max_tokens=2))
    results.drain(core)
    assert [arrival.request_id for batch in runner.batches for arrival in batch.new_requests] == order


def test_preemption_keeps_a_request_with_its_adapter() -> None:
    core, _ = make_core(num_blocks=9, prefix_caching=False)
    results = run(core, prompts("aba", max_tokens=10))
    assert results.preemptions >= 1


def test_a_request_that_resumes_goes_on_under_its_adapter() -> None:
    core, _ = make_core()
    [message] = prompts("a", max_tokens=8)
    whole = tokens_alone(message)
    message.output_token_ids = whole[:3]
    core.add_request(message)
    assert Results().drain(core).tokens == {"0a": whole[3:]}


def test_the_least_recently_used_adapter_makes_room_and_comes_back_when_it_is_wanted() -> None:
    core, runner = make_core(max_cpu_loras=2)
    run(core, prompts("a"))
    run(core, prompts("b"))
    run(core, prompts("a"))
    run(core, prompts("c"))
    assert sorted(runner.adapters.values()) == ["a", "c"]
    run(core, prompts("b"))
    assert sorted(runner.adapters.values()) == ["b", "c"]


def test_a_pinned_adapter_is_never_dropped() -> None:
    core, runner = make_core(max_loras=1, max_cpu_loras=2)
    add(core, "a")
    assert core.call("pin_lora", adapter("a").lora_int_id).result()
    assert not core.call("pin_lora", 17).result()
    run(core, prompts("b"))
    run(core, prompts("c"))
    assert sorted(runner.adapters.values()) == ["a", "c"]


def test_where_all_adapters_are_pinned_another_one_is_refused() -> None:
    core, _ = make_core(max_loras=1, max_cpu_loras=1)
    add(core, "a")
    core.call("pin_lora", adapter("a").lora_int_id).result()
    with pytest.raises(LoRACapacityError, match=r"1 adapters \(max_cpu_loras\)"):
        add(core, "b")
    core.add_request(prompts("b")[0])
    assert "no room" in Results().drain(core).errors["0b"]


def test_an_adapter_that_cannot_be_read_drops_no_other() -> None:
    core, runner = make_core("ab", max_loras=1, max_cpu_loras=2)
    with pytest.raises(LoRAError, match="broken"):
        core.call("add_lora", adapter("x", "broken").to_wire()).result()
    assert sorted(runner.adapters.values()) == ["a", "b"]


def test_more_adapters_than_there_is_room_for_take_turns() -> None:
    core, runner = make_core(max_loras=1, max_cpu_loras=1)
    run(core, prompts("abcabc.ab"))
    assert len(runner.adapters) == 1


def test_a_request_that_waits_for_room_is_not_starved_by_users_of_what_is_loaded() -> None:
    core, runner = make_core(max_loras=1, max_cpu_loras=1)
    results = Results()
    endless = iter(range(1000))

    def add_a() -> None:
        core.add_request(core_request(f"a{next(endless)}", [5, 6], lora="a", max_tokens=3, ignore_eos=True))

    add_a()
    results.step(core)
    core.add_request(core_request("b", [5, 6], lora="b", max_tokens=1))
    for _ in range(20):
        add_a()
        results.step(core)
        if "b" in results.finished:
            break
    assert "b" in results.finished
    results.drain(core)
    assert set(runner.adapters.values()) == {"a"}


def test_removing_an_adapter_lets_its_requests_end_and_then_gives_its_memory_back() -> None:
    core, runner = make_core("a")
    [message] = prompts("a", max_tokens=6)
    core.add_request(message)
    results = Results()
    results.step(core)
    assert core.call("remove_lora", adapter("a").lora_int_id).result()
    assert core.call("list_loras").result() == []
    assert list(runner.adapters.values()) == ["a"]
    core.add_request(core_request("late", [5], lora="a", max_tokens=2))  # names its path, so it is read again
    results.drain(core)
    assert results.tokens["0a"] == tokens_alone(message)
    assert sorted(runner.adapters) == [max(runner.adapters)]
    assert not core.call("remove_lora", 12345).result()


def test_replacing_an_adapter_leaves_running_requests_with_what_they_began_with() -> None:
    core, runner = make_core("a")
    [message] = prompts("a", max_tokens=6)
    core.add_request(message)
    results = Results()
    results.step(core)
    [old] = runner.adapters
    assert add(core, "a", load_inplace=True)
    assert len(runner.adapters) == 2
    results.drain(core)
    assert results.tokens["0a"] == tokens_alone(message)
    assert old not in runner.adapters and len(runner.adapters) == 1


def test_an_aborted_request_lets_its_adapter_go_also_while_it_waits() -> None:
    core, _ = make_core(max_loras=1, max_cpu_loras=1)
    for message in prompts("ab"):
        core.add_request(message)
    results = Results()
    results.step(core)
    core.abort_requests(["0a", "1b"])
    results.drain(core)
    assert results.finished == {}
    core.check_integrity()
    run(core, prompts("c"))


def test_a_request_that_waits_for_its_adapter_counts_among_those_that_wait() -> None:
    core, _ = make_core("a", max_loras=1, max_cpu_loras=1, max_num_queued_requests=1)
    running, first, second, third = prompts("abcb")
    core.add_request(running)
    results = Results()
    results.step(core)
    core.add_request(first)
    core.add_request(second)
    results.step(core)
    assert list(results.errors) == ["2c"]
    core.abort_requests([first.request_id])
    core.add_request(third)
    results.drain(core)
    assert results.finished.keys() == {"0a", "2c", "3b"}


def test_a_request_that_waits_for_its_grammar_uses_its_adapter_already(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = make_core("a")
    release = threading.Event()
    monkeypatch.setattr(
        core._grammars, "_prepare", lambda request, _: release.wait(20) and PreparedRequest(request, None)
    )
    core.add_request(core_request("0a", [5, 6], lora="a", structured_outputs={"regex": "ab"}, max_tokens=2))
    results = Results()
    results.step(core)  # which checks the core's integrity
    release.set()
    results.drain(core)
    assert "0a" in results.finished


def test_who_waited_behind_an_aborted_request_waits_no_longer() -> None:
    core, _ = make_core(max_loras=1, max_cpu_loras=1)
    running, first, second = prompts("aba", max_tokens=8)
    core.add_request(running)
    results = Results()
    results.step(core)
    core.add_request(first)
    core.add_request(second)
    results.step(core)
    core.abort_requests([first.request_id])
    results.step(core)
    assert second.request_id in results.tokens
    assert running.request_id not in results.finished
    results.drain(core)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (adapter("x", "broken"), "it is broken; in two ways"),
        (adapter("x", "bug"), "RuntimeError: the fake loader failed"),
        (adapter("x", ""), "'x' is not loaded"),
        (adapter("other", lora_int_id=adapter("a").lora_int_id), "is 'a''s, not 'other''s"),
        (adapter("a", "/elsewhere"), "another folder"),
    ],
    ids=["broken", "bug", "unknown", "another name", "another path"],
)
def test_a_request_whose_adapter_cannot_be_served_ends_with_the_reason(request_: LoRARequest, words: str) -> None:
    core, _ = make_core()
    add(core, "a")
    message = core_request("wrong", [5], max_tokens=2)
    message.lora_request = request_
    good = prompts("a")
    core.add_request(message)
    for other in good:
        core.add_request(other)
    results = Results().drain(core)
    assert results.finished["wrong"] is FinishReason.ERROR
    assert words in results.errors["wrong"]
    assert results.tokens["0a"] == tokens_alone(good[0])


def test_an_engine_without_adapters_refuses_them() -> None:
    core = EngineCore(fake_config(), FakeRunner())
    with pytest.raises(LoRAError, match="enable_lora is not set"):
        core.call("list_loras").result()
    core.add_request(prompts("a")[0])
    assert "enable_lora" in Results().drain(core).errors["0a"]


def test_a_runner_that_serves_no_adapters_keeps_the_engine_from_starting() -> None:
    with pytest.raises(ConfigError, match="serves no LoRA adapters"):
        make_core(caps=RunnerCapabilities())


def test_adapters_that_are_named_at_the_start_are_loaded_with_the_model() -> None:
    _, runner = make_core(preload=[adapter("a"), adapter("b")])
    assert sorted(runner.adapters.values()) == ["a", "b"]
    with pytest.raises(ConfigError, match="'x': it is broken"):
        make_core(preload=[adapter("a"), adapter("x", "broken")])


def test_others_go_on_while_an_adapter_is_read() -> None:
    runner = FakeRunner(caps=RunnerCapabilities(lora=True))
    core = EngineCore(fake_config(lora=LoRAConfig()), runner)  # which loads adapters in a thread
    woken: queue.SimpleQueue[bool] = queue.SimpleQueue()
    core.wake = lambda: woken.put(True)
    runner.gate = threading.Event()
    messages = prompts("a.")
    for message in messages:
        core.add_request(message)
    results = Results().drain(core)
    assert results.tokens == {"1.": tokens_alone(messages[1])}
    assert not core.has_work()
    runner.gate.set()
    assert woken.get(timeout=20)
    results.drain(core)
    assert results.tokens["0a"] == tokens_alone(messages[0])
    core.shutdown()


def test_a_lora_request_is_its_name_and_may_choose_its_id() -> None:
    assert LoRARequest("sql", 1, "/x") == LoRARequest("sql", 1, "/x", load_inplace=True)
    assert LoRARequest("sql").lora_int_id == LoRARequest("sql", lora_path="/x").lora_int_id > 0
    assert LoRARequest("sql").lora_int_id != LoRARequest("sql2").lora_int_id
    assert LoRARequest.from_wire(LoRARequest("sql", 7, "/x").to_wire()) == LoRARequest("sql", 7, "/x")
    with pytest.raises(InvalidRequestError) as refused:
        LoRARequest("", -1, 5)  # type: ignore[arg-type]
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_loras": 0}, "max_loras must be an integer of at least 1, got 0"),
        ({"max_lora_rank": 0}, "max_lora_rank must be an integer of at least 1, got 0"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras must be at least 4, max_loras, got 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineArgs(model="m", enable_lora=True, **options).create_engine_config()  # type: ignore[arg-type]


def test_options_reach_the_core_through_the_wire() -> None:
    config = EngineArgs(model="m", enable_lora=True, max_loras=3).create_engine_config()
    assert config.lora is not None
    config.lora.preload.append(adapter("a"))
    assert type(config).from_wire(config.to_wire()) == config
    assert config.lora.max_cpu_loras == 3
    assert EngineArgs(model="m").create_engine_config().lora is None
