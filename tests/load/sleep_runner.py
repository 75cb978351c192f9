"""A runner that computes nothing: a step sleeps for `LOAD_STEP_SECONDS`, and takes no processor time."""

import json
import os
import time
from pathlib import Path

from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.contracts import KVSpec, ModelInfo, RunnerCapabilities, StepBatch, StepOutput
from headrace_engine.text.tokenizer_parts import TokenizerParts

RUNNER = "load.sleep_runner:create_runner"
TOKENIZER = "load.sleep_runner:load_tokenizer"
_TOKENS = range(40, 140)  # tokens of the tests' tokenizer that decode to text


class SleepRunner:
    """Implements `ModelRunner`. Each request gets the tokens of `_TOKENS` in turn."""

    def __init__(self, step_seconds: float, max_model_len: int) -> None:
        self._step_seconds = step_seconds
        self._max_model_len = max_model_len
        self._missing: dict[str, int] = {}
        """Request id -> number of its known tokens that are not computed yet."""
        self._num_drawn: dict[str, int] = {}

    def load_model(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=384,
            max_model_len=self._max_model_len,
            eos_token_ids=[0],
            architecture="Sleep",
            dtype="float32",
            device="none",
            attention="none",
            num_parameters=0,
        )

    def capabilities(self) -> RunnerCapabilities:
        return RunnerCapabilities()

    def kv_spec(self) -> KVSpec:
        return KVSpec(block_size=32, bytes_per_block=1, default_memory=1 << 20, available_memory=None)

    def init_kv_cache(self, num_blocks: int, num_states: int) -> None: ...

    def warm_up(self) -> None: ...

    def shutdown(self) -> None: ...

    def execute_model(self, batch: StepBatch) -> StepOutput:
        for request_id in batch.removed_request_ids:
            del self._missing[request_id], self._num_drawn[request_id]
        for new in batch.new_requests:
            self._missing[new.request_id] = len(new.token_ids) - new.num_computed_tokens
            self._num_drawn[new.request_id] = 0
        time.sleep(self._step_seconds)
        sampled: dict[str, list[int]] = {}
        for request_id, count in batch.num_scheduled_tokens.items():
            self._missing[request_id] -= count
            if not self._missing[request_id]:
                self._missing[request_id] = 1
                sampled[request_id] = [_TOKENS[self._num_drawn[request_id] % len(_TOKENS)]]
                self._num_drawn[request_id] += 1
        return StepOutput(sampled_token_ids=sampled, phase_seconds={"forward": self._step_seconds})


def load_tokenizer(config: EngineConfig) -> TokenizerParts:
    """Read the files of the tests' tokenizer. transformers would import torch: 12 s of a processor at each start."""
    folder = Path(config.model.model)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    return TokenizerParts(
        tokenizer_json=(folder / "tokenizer.json").read_bytes(),
        chat_template=template.read_text() if template.exists() else settings.get("chat_template"),
        special_tokens={name: token for name, token in settings.items() if name.endswith("_token")},
        eos_token_id=0,
    )


def create_runner(config: EngineConfig) -> SleepRunner:
    """Return the runner; the engine process imports this function."""
    return SleepRunner(float(os.environ["LOAD_STEP_SECONDS"]), config.model.max_model_len or 2048)
