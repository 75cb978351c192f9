"""AsyncLLMEngine: many streams, consumers that leave, and engines that die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.tiny_models import TinyModel
from headrace_engine import AsyncEngineArgs, AsyncLLMEngine, RequestOutput, SamplingParams
from headrace_engine.core.core_client import InProcessCore
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import DuplicateRequestError, EngineDeadError, EngineDrainingError, InvalidRequestError
from headrace_engine.requests.sampling_params import RequestOutputKind
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make(llama: TinyModel, *, core_in_process: bool) -> AsyncLLMEngine:
    args = AsyncEngineArgs(
        model=llama.folder, dtype="float32", num_blocks=80, block_size=16, core_in_process=core_in_process
    )
    return AsyncLLMEngine.from_engine_args(args)


@pytest.fixture
async def engine(llama: TinyModel) -> AsyncIterator[AsyncLLMEngine]:
    made = make(llama, core_in_process=True)
    yield made
    await made.shutdown()


@pytest.fixture
async def child_engine(llama: TinyModel) -> AsyncIterator[AsyncLLMEngine]:
    made = make(llama, core_in_process=False)
    yield made
    await made.shutdown()


async def collect(
    engine: AsyncLLMEngine, name: str, prompt: Any = "mill", params: SamplingParams = SHORT
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def assert_nothing_is_left(engine: AsyncLLMEngine) -> None:
    """The core takes commands in order: once a later request has been served, earlier aborts have been, too."""
    await collect(engine, "afterwards")
    assert isinstance(engine._core, InProcessCore)
    scheduler = engine._core.core.scheduler
    assert scheduler.requests == {}
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert len(engine._output_processor) == 0
    assert engine._streams == {}


async def test_streams_run_side_by_side_and_each_gets_its_own_text(engine: AsyncLLMEngine) -> None:
    prompts = ["mill", "wheel", "The queue holds", "mill"]
    alone = [(await collect(engine, f"alone {i}", prompt))[-1] for i, prompt in enumerate(prompts)]
    together = await asyncio.gather(*(collect(engine, str(i), prompt) for i, prompt in enumerate(prompts)))
    assert [outputs[-1].outputs[0].text for outputs in together] == [output.outputs[0].text for output in alone]
    assert all([len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4] for outputs in together)
    assert all([o.finished for o in outputs] == [False, False, False, True] for outputs in together)


async def test_a_chat_streams_too(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = [output async for output in engine.chat([{"role": "user", "content": "hello"}], params, "a")]
    assert len(outputs) == 1
    assert outputs[0].prompt == "<|user|>hello<eos><|assistant|>"


async def test_a_consumer_that_breaks_off_frees_its_request(engine: AsyncLLMEngine) -> None:
    async for _ in engine.generate("mill", LONG, "left"):
        break
    await assert_nothing_is_left(engine)


async def test_a_closed_generator_has_aborted_its_request_when_it_returns(engine: AsyncLLMEngine) -> None:
    stream = engine.generate("mill", LONG, "left")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine._streams == {}
    await assert_nothing_is_left(engine)


async def test_a_cancelled_task_frees_its_request(engine: AsyncLLMEngine) -> None:
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.generate("mill", LONG, "cancelled"):
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_is_left(engine)


async def test_an_abort_ends_the_stream_with_its_reason(engine: AsyncLLMEngine) -> None:
    outputs: list[RequestOutput] = []
    async for output in engine.generate("mill", LONG, "a"):
        outputs.append(output)
        if len(outputs) == 2:
            await engine.abort("a")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 200
    await engine.abort("a")
    await engine.abort("never there")
    await assert_nothing_is_left(engine)


async def test_a_wrong_request_is_refused_and_an_id_in_use_too(engine: AsyncLLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        await collect(engine, "a", "")
    stream = engine.generate("mill", LONG, "a")
    await anext(stream)
    with pytest.raises(DuplicateRequestError):
        await collect(engine, "a")
    await engine.abort("a")
    assert [output.finished async for output in stream][-1]
    await assert_nothing_is_left(engine)


DIGITS = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[0-9]{5}"))


async def test_an_id_is_in_use_while_its_grammar_is_tried(engine: AsyncLLMEngine) -> None:
    first, second = await asyncio.gather(
        collect(engine, "a", params=DIGITS), collect(engine, "a", params=DIGITS), return_exceptions=True
    )
    assert isinstance(first, list) and first[-1].finished
    assert isinstance(second, DuplicateRequestError)
    await assert_nothing_is_left(engine)


async def test_a_request_whose_grammar_is_tried_can_be_aborted(engine: AsyncLLMEngine) -> None:
    waiting = asyncio.create_task(collect(engine, "a", params=DIGITS))
    await asyncio.sleep(0)
    await engine.abort("a")
    (last,) = await waiting
    assert (last.finished, last.outputs[0].finish_reason, last.outputs[0].token_ids) == (True, "abort", [])
    await assert_nothing_is_left(engine)


async def test_a_drain_waits_for_a_request_whose_grammar_is_tried(engine: AsyncLLMEngine) -> None:
    waiting = asyncio.create_task(collect(engine, "a", params=DIGITS))
    await asyncio.sleep(0)
    await engine.drain()
    assert (await waiting)[-1].finished


async def test_a_stop_string_frees_the_request_in_the_core(engine: AsyncLLMEngine) -> None:
    text = (await collect(engine, "free"))[-1].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=[text[:2]])
    assert (await collect(engine, "a", params=params))[-1].outputs[0].stop_reason == text[:2]
    await assert_nothing_is_left(engine)


async def test_shutting_down_ends_open_streams_and_refuses_new_ones(llama: TinyModel) -> None:
    engine = make(llama, core_in_process=True)
    stream = engine.generate("mill", LONG, "a")
    await anext(stream)
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await collect(engine, "b")
    assert not engine.is_running


async def test_a_child_streams_and_gives_everything_back(llama: TinyModel, child_engine: AsyncLLMEngine) -> None:
    here = make(llama, core_in_process=True)
    assert (await collect(child_engine, "a"))[-1].outputs == (await collect(here, "a"))[-1].outputs
    await here.shutdown()
    core = child_engine._core
    assert isinstance(core, EngineCoreProcess)
    descriptor = core.fileno()
    await child_engine.shutdown()
    assert core._process.poll() == 0
    with pytest.raises(OSError):
        os.fstat(descriptor)


async def test_a_killed_child_ends_every_stream_with_the_reason(child_engine: AsyncLLMEngine) -> None:
    core = child_engine._core
    assert isinstance(core, EngineCoreProcess)
    streams = [child_engine.generate("mill", LONG, name) for name in "ab"]
    for stream in streams:
        await anext(stream)
    await child_engine.check_health()
    os.kill(core.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            async for _ in stream:
                pass
    with pytest.raises(EngineDeadError):
        await child_engine.check_health()
    with pytest.raises(EngineDeadError):
        await collect(child_engine, "c")


async def test_a_drain_lets_streams_end_and_refuses_new_ones(engine: AsyncLLMEngine) -> None:
    stream = engine.generate("mill", SamplingParams(max_tokens=30, ignore_eos=True), "a")
    await anext(stream)
    with pytest.raises(TimeoutError, match="1 requests have not ended after 0 s"):
        await engine.drain(timeout=0)
    with pytest.raises(EngineDrainingError):
        await collect(engine, "b")
    draining = asyncio.create_task(engine.drain())
    outputs = [output async for output in stream]
    await draining
    assert len(outputs[-1].outputs[0].token_ids) == 30
    assert (engine.is_running, engine.errored, engine.dead_error) == (True, False, None)


async def test_an_idle_engine_is_drained_at_once(engine: AsyncLLMEngine) -> None:
    await engine.drain(timeout=60)
    with pytest.raises(EngineDrainingError):
        await collect(engine, "a")


async def test_a_drain_ends_with_the_engines_death(child_engine: AsyncLLMEngine) -> None:
    core = child_engine._core
    assert isinstance(core, EngineCoreProcess)
    stream = child_engine.generate("mill", LONG, "a")
    await anext(stream)
    draining = asyncio.create_task(child_engine.drain())
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await draining
    assert child_engine.errored
    assert isinstance(child_engine.dead_error, EngineDeadError)


async def test_several_requests_are_aborted_by_one_call(engine: AsyncLLMEngine) -> None:
    streams = [engine.generate("mill", LONG, name) for name in "abc"]
    for stream in streams:
        await anext(stream)
    await engine.abort(["a", "c", "never there"])
    ends = [[output async for output in stream][-1].outputs[0].finish_reason for stream in (streams[0], streams[2])]
    assert ends == ["abort", "abort"]
    await engine.abort("b")
    assert [output async for output in streams[1]][-1].finished
    await assert_nothing_is_left(engine)
