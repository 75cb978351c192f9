"""docs/vllm.md, made of vLLM's public signatures and of ours.

`signatures.json` holds the names of vLLM's classes, their fields, methods and arguments. Every one of them is either
here, or in the tables of `headrace_engine.vllm_names`.
"""

import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from headrace_engine.api import async_llm, beam_search, llm, llm_engine
from headrace_engine.options import engine_args
from headrace_engine.requests import lora_request, outputs, sampling_params
from headrace_engine.requests import structured_outputs_params as structured
from headrace_engine.vllm_names import RENAMED, WITHOUT_EFFECT, is_vllms

PAGE: Final = Path(__file__).parents[2] / "docs" / "vllm.md"
_SIGNATURES: Final = Path(__file__).with_name("signatures.json")

_OURS: Final[dict[str, type]] = {
    "EngineArgs": engine_args.AsyncEngineArgs,
    "LLM": llm.LLM,
    "LLMEngine": llm_engine.LLMEngine,
    "AsyncLLMEngine": async_llm.AsyncLLMEngine,
    "SamplingParams": sampling_params.SamplingParams,
    "StructuredOutputsParams": structured.StructuredOutputsParams,
    "BeamSearchParams": beam_search.BeamSearchParams,
    "RepetitionDetectionParams": sampling_params.RepetitionDetectionParams,
    "LoRARequest": lora_request.LoRARequest,
    "RequestOutput": outputs.RequestOutput,
    "CompletionOutput": outputs.CompletionOutput,
    "Logprob": outputs.Logprob,
    "RequestStateStats": outputs.RequestStateStats,
}
_INTRODUCTION: Final = """\
# For users of vLLM

The engine has the names and meanings of vLLM's Python interface. Change the import: the program then runs, or ends with
an error that names the missing part. An option of vLLM that Headrace does not have is accepted only with a value that
has no effect, such as `pipeline_parallel_size=1`.

```python
from headrace_engine import LLM, SamplingParams  # from vllm import LLM, SamplingParams

llm = LLM("path/or/name", max_model_len=4096, seed=0)
llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.7, max_tokens=64))
```

Other differences:

- Without `seed` each run draws other tokens; vLLM's default is `seed=0`. With a seed in the request or the engine, a
  request gets the same tokens whatever else is in the batch ([determinism.md](determinism.md)).
- [sampling.md](sampling.md) lists the parameters that differ in their meaning or limits.
- Errors are those of `headrace_engine.errors`: `InvalidRequestError` and `ConfigError` are `ValueError`s, as in vLLM.
- `AsyncLLMEngine.shutdown()` may be called as in vLLM. If it is awaited, it also ends the streams.
- The chat template gets `tool_calls` of messages as in vLLM. Tool calls in outputs are text.
- `max_model_len=-1` takes as much of the model's context as the KV memory holds.
- `RequestOutput.metrics` and `get_metrics` need no `disable_log_stats=False`. The classes of metrics are in
  `headrace_engine.api.metrics`; their names begin with `vllm:`, as in vLLM.
- The default model, `LLM("smollm2-135m-instruct")`, is not fetched from the Hugging Face hub.

| not here | instead |
|---|---|
| `gpu_memory_utilization`, `cpu_offload_gb`, `swap_space` | `kv_cache_memory`, the bytes of KV memory |
| `pipeline_parallel_size`, `data_parallel_size`, `nnodes` and the like | more workers on one queue |
| `compilation_config`, `cudagraph_*` | `attention_backend`, `enforce_eager`, `batch_invariant` |
| options of the scheduler | `scheduling_policy`, `max_num_batched_tokens`, `long_prefill_token_threshold` |
| `best_of`, `use_beam_search` | `n`, `LLM.beam_search` |
| `guided_decoding`, `structural_tag` | `structured_outputs`; a `grammar` can mix free text and fixed formats |
| `SamplingParams.logits_processors` | `logits_processors` of the engine, and their values in `extra_args` |
| `thinking_token_budget` | `max_tokens` |
| `truncate_prompt_tokens`, `tokenization_kwargs` | tokenise the prompt yourself, and pass `prompt_token_ids` |
| `reasoning_parser` and parsers of tool calls | the text is returned as the model wrote it; the gateway parses it |
| `hf_overrides`, `rope_*` | a changed `config.json` in the model's folder |
| `download_dir`, `hf_token` | a folder as the model, or `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` in the environment |
| `served_model_name` | `headrace worker --served-model-name` |
| `sleep`, `wake_up`, updates of weights | `close()`, and a new engine |
| `enqueue`, `wait_for_completion` | `LLMEngine.add_request` and `step` |
| `pause_generation`, `resume_generation` | `drain`, or `abort` |
| `model_config`, `vllm_config` | `llm_engine.model_info` |
| `start_profile`, `stop_profile` | a profiler such as py-spy or torch.profiler |
| `stat_loggers`, `do_log_stats` | `get_metrics`; [monitoring.md](monitoring.md) for the service |
| `encode`, images, audio, video | none: `generate` gives text, and `embed`, `classify` and `score` numbers for texts |

Below is every public name of vLLM {version}, class by class. This page is generated: `cd tests && python -m vllm_api`.
"""


class Unclassified(Exception):
    """Names of vLLM that are neither here nor in the tables."""


def page() -> str:
    """The whole page. Raises Unclassified, with all the names."""
    stored = json.loads(_SIGNATURES.read_text())
    parts = [_INTRODUCTION.replace("{version}", stored["version"])]
    unclassified: list[str] = []
    for name, theirs in stored["classes"].items():
        section = _Section(name, theirs)
        parts.append(section.text())
        unclassified += section.unclassified
    if unclassified:
        raise Unclassified(", ".join(unclassified))
    return "\n".join(parts)


class _Section:
    def __init__(self, name: str, theirs: dict[str, Any]) -> None:
        self._name = name
        self._ours = _OURS[name]
        self.here: list[str] = []
        self.renamed: list[str] = []
        self.without_effect: list[str] = []
        self.missing: list[str] = []
        self.unclassified: list[str] = []
        for field in theirs["fields"]:
            self._classify(field, field in _fields_of(self._ours) or hasattr(self._ours, field))
        for method, arguments in theirs["methods"].items():
            if method == "__init__":
                self._classify_arguments(method, arguments)
                continue
            is_here = hasattr(self._ours, method) or method in self._ours.__annotations__
            self._classify(method, is_here)
            if is_here:
                self._classify_arguments(method, arguments)
        listed = {*theirs["fields"], *theirs["methods"], *theirs["methods"].get("__init__", ())}
        self.beyond = [name for name in _public_names(self._ours) if name not in listed]

    def _classify(self, name: str, is_here: bool) -> None:
        if name in RENAMED:
            self.renamed.append(f"`{name}` (also `{RENAMED[name]}`)")
        elif name in WITHOUT_EFFECT.get(self._name, ()):
            self.without_effect.append(f"`{name}`")
        elif is_here:
            self.here.append(f"`{name}`")
        elif is_vllms(self._name, name):
            self.missing.append(f"`{name}`")
        else:
            self.unclassified.append(f"{self._name}.{name}")

    def _classify_arguments(self, method: str, arguments: Iterable[str]) -> None:
        function = getattr(self._ours, method, None)
        if not callable(function):
            return
        ours = inspect.signature(function).parameters
        for argument in arguments:
            if is_vllms("arguments", argument):
                self.missing.append(f"`{method}({argument})`")
            elif argument not in ours and "chat_options" not in ours:
                self.unclassified.append(f"{self._name}.{method}({argument})")

    def text(self) -> str:
        lines = [f"## {self._name}\n"]
        for title, names in (
            ("Here", self.here),
            ("Here, under vLLM's name and another one", self.renamed),
            ("Accepted, without effect", self.without_effect),
            ("Beyond vLLM", [f"`{name}`" for name in self.beyond]),
            ("Not here", self.missing),
        ):
            if names:
                lines.append(f"{title}: {', '.join(names)}.\n")
        return "\n".join(lines)


def _fields_of(kind: type) -> set[str]:
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


def _public_names(kind: type) -> Iterator[str]:
    """In the order in which the class has them."""
    seen = [*_fields_of(kind)] if is_dataclass(kind) else []
    order = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    order += [name for name in vars(kind) if name not in seen and not name.startswith("_")]
    yield from order
