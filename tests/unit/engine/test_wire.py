"""Messages to and from the core survive msgpack; a wrong config is refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest

from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, PooledRows, StepStats
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import ModelInfo, PoolingInfo
from unit.engine.fake_runner import fake_config
from unit.engine.requests import core_request, request


def over_the_wire(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value))


def test_a_request_survives_the_wire() -> None:
    sent = core_request(
        "a",
        [1, 2],
        output=[3],
        seed=-(2**63),
        priority=4,
        arrival_time=1.5,
        cache_salt="s",
        stop_token_ids=[1],
        top_k=3,
        logit_bias={4: 1.5},
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
    )
    sent.bad_words_token_ids = [[1, 2], [3]]
    assert EngineCoreRequest.from_wire(over_the_wire(sent.to_wire())) == sent


def test_a_pooling_request_and_its_rows_survive_the_wire() -> None:
    sent = PoolingCoreRequest(
        request_id="a", task="score", inputs=[[1, 2], [3]], first=4, second_from=[1, 0], dimensions=2, activation=False
    )
    assert PoolingCoreRequest.from_wire(over_the_wire(sent.to_wire())) == sent
    rows = [PooledRows("a", 4, 1, b"\xff\x00\x80?"), PooledRows("a", 5, 0, b"", True, "no")]
    step = EngineCoreOutputs(outputs=[], stats=StepStats(), rows=rows)
    assert EngineCoreOutputs.from_wire(over_the_wire(step.to_wire())) == step


def test_the_description_of_a_pooling_model_survives_the_wire() -> None:
    pooling = PoolingInfo(
        tasks=("embed",), dimensions=384, max_input_tokens=256, matryoshka_dimensions=(384, 64), prompts={"q": "find: "}
    )
    model = ModelInfo(
        vocab_size=100, max_model_len=256, eos_token_ids=[], architecture="A", dtype="float32", device="cpu",
        attention="native", num_parameters=1, pooling=pooling,
    )  # fmt: skip
    assert ModelInfo.from_wire(over_the_wire(asdict(model))) == model
    assert ModelInfo.from_wire(over_the_wire(asdict(replace(model, pooling=None)))).pooling is None


def test_a_config_survives_the_wire() -> None:
    config = fake_config(policy="priority", num_blocks=None)
    assert EngineConfig.from_wire(over_the_wire(config.to_wire())) == config


def test_a_steps_news_survive_the_wire() -> None:
    sent = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(request_id="a", new_token_ids=[1, 2], num_cached_tokens=3),
            EngineCoreOutput(request_id="c", new_token_ids=[1], prompt_logprobs=[], stop_reason="repetition_detected"),
            EngineCoreOutput(
                request_id="b", new_token_ids=[], finish_reason=FinishReason.ERROR, stop_reason=5, error="no"
            ),
        ],
        stats=StepStats(step_seconds=0.5, kind="mixed", preemptions=2, phase_seconds={"forward": 0.25}),
    )
    assert EngineCoreOutputs.from_wire(over_the_wire(sent.to_wire())) == sent


def test_log_probabilities_survive_the_wire_as_triples() -> None:
    sent = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id="a", new_token_ids=[1], logprobs=[[(1, -0.5, 1), (2, -1.0, 2)]])],
        stats=StepStats(),
    )
    (news,) = EngineCoreOutputs.from_wire(over_the_wire(sent.to_wire())).outputs
    assert news.logprobs is not None
    assert [tuple(entry) for entry in news.logprobs[0]] == [(1, -0.5, 1), (2, -1.0, 2)]


def test_all_wrong_options_are_named_at_once() -> None:
    wrong: Any = {"dtype": "int4", "scheduling_policy": "lottery", "block_size": 0, "max_num_seqs": "many"}
    wrong["max_num_batched_tokens"] = True
    with pytest.raises(ConfigError) as refused:
        EngineArgs(model="", **wrong).create_engine_config()
    for part in (
        "dtype must be one of auto, float32, bfloat16, got 'int4'",
        "scheduling_policy must be one of fcfs, priority, got 'lottery'",
        "block_size must be an integer of at least 1, got 0",
        "max_num_seqs must be an integer of at least 1, got 'many'",
        "max_num_batched_tokens must be an integer of at least 1, got True",
        "model must be a model folder or a hub name, got ''",
    ):
        assert part in str(refused.value)


def test_flat_options_reach_the_topic_that_they_belong_to() -> None:
    config = EngineArgs(model="m", num_blocks=5, max_model_len=9, scheduling_policy="priority").create_engine_config()
    assert (config.cache.num_blocks, config.model.max_model_len, config.scheduler.policy) == (5, 9, "priority")


def test_a_blocks_identity_holds_its_tokens_its_past_and_its_salt() -> None:
    def last_hash(prompt: list[int], **more: str) -> bytes:
        return request("x", prompt, **more).block_hashes[-1]

    base = last_hash([1, 2, 3, 4, 5, 6, 7, 8])
    assert last_hash([1, 2, 3, 4, 5, 6, 7, 8, 9]) == base
    assert len({base, last_hash([5, 6, 7, 8]), last_hash([1, 2, 3, 9, 5, 6, 7, 8])}) == 3
    assert last_hash([1, 2, 3, 4, 5, 6, 7, 8], cache_salt="other") != base
    grown = request("x", [1, 2, 3, 4, 5, 6])
    grown.append_token(7)
    grown.append_token(8)
    assert grown.block_hashes[-1] == base
