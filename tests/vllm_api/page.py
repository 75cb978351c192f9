"""docs/vllm.md, made of vLLM's public signatures and of ours.

`signatures.json` holds the names of vLLM's classes, their fields, methods and arguments. Every one of them is either
here, or has a sentence in `headrace_engine.vllm_names`.
"""

import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from headrace_engine import async_llm, beam_search, engine_args, llm, llm_engine, lora_request, outputs, sampling_params
from headrace_engine import structured_outputs_params as structured
from headrace_engine.vllm_names import RENAMED, WITHOUT_EFFECT, instead_of

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

The engine has the shapes, names and meanings of vLLM's Python interface: change the import, and the program runs, or
fails with an error that names the missing part and its replacement. An option that is not here is accepted with the
value that changes nothing, such as `pipeline_parallel_size=1`.

```python
from headrace_engine import LLM, SamplingParams  # from vllm import LLM, SamplingParams

llm = LLM("path/or/name", max_model_len=4096, seed=0)
llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.7, max_tokens=64))
```

Other differences:

- Without `seed` each run draws anew; vLLM's default is `seed=0`. With a seed, in the request or the engine, the same
  tokens are drawn whatever else is in the batch ([determinism.md](determinism.md)).
- [sampling.md](sampling.md) lists the parameters that differ in their meaning or limits.
- Errors are those of `headrace_engine.errors`: `InvalidRequestError` and `ConfigError` are `ValueError`s, as in vLLM.
- `AsyncLLMEngine.shutdown()` may be called as in vLLM, or awaited: streams end when it is awaited.
- The chat template gets `tool_calls` of messages as in vLLM. Those in outputs are text.
- `max_model_len=-1` takes as much of the model's context as the KV memory holds.
- `RequestOutput.metrics` and `get_metrics` need no `disable_log_stats=False`. The classes of metrics are in
  `headrace_engine.engine_metrics`; their names begin with `vllm:`, as in vLLM.
- The default model, `LLM("smollm2-135m-instruct")`, needs no hub.

Below is every public name of vLLM {version}, class by class. This page is generated: `cd tests && python -m vllm_api`.
"""


class Unclassified(Exception):
    """Names of vLLM's that are neither here nor have a sentence."""


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
        self.instead: dict[str, list[str]] = {}
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
        sentence = instead_of(self._name, name)
        if name in RENAMED:
            self.renamed.append(f"`{name}` (also `{RENAMED[name]}`)")
        elif name in WITHOUT_EFFECT.get(self._name, ()):
            self.without_effect.append(f"`{name}`")
        elif is_here:
            self.here.append(f"`{name}`")
        elif sentence:
            self.instead.setdefault(sentence, []).append(f"`{name}`")
        else:
            self.unclassified.append(f"{self._name}.{name}")

    def _classify_arguments(self, method: str, arguments: Iterable[str]) -> None:
        function = getattr(self._ours, method, None)
        if not callable(function):
            return
        ours = inspect.signature(function).parameters
        for argument in arguments:
            sentence = instead_of("arguments", argument)
            if sentence:
                self.instead.setdefault(sentence, []).append(f"`{method}({argument})`")
            elif argument not in ours and "chat_options" not in ours:
                self.unclassified.append(f"{self._name}.{method}({argument})")

    def text(self) -> str:
        lines = [f"## {self._name}\n"]
        for title, names in (
            ("Here", self.here),
            ("Here by two names", self.renamed),
            ("Taken, without effect", self.without_effect),
            ("Beyond vLLM", [f"`{name}`" for name in self.beyond]),
        ):
            if names:
                lines.append(f"{title}: {', '.join(names)}.\n")
        if self.instead:
            lines += ["| not here | instead |", "|---|---|"]
            lines += [f"| {', '.join(names)} | {sentence} |" for sentence, names in self.instead.items()]
            lines.append("")
        return "\n".join(lines)


def _fields_of(kind: type) -> set[str]:
    return {field.name for field in fields(kind)} if is_dataclass(kind) else set()


def _public_names(kind: type) -> Iterator[str]:
    """In the order in which the class has them."""
    seen = [*_fields_of(kind)] if is_dataclass(kind) else []
    order = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    order += [name for name in vars(kind) if name not in seen and not name.startswith("_")]
    yield from order
