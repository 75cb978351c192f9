"""`docs/models.md`, made from what the tests of the model families prove."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from engine.model_families import FAMILIES, REFUSED, Family
from headrace_engine.runner.models.loading import is_hybrid

_INTRODUCTION = """\
# Models

Written by `tests/engine/test_model_families.py`; do not edit.

The engine runs transformers' own modelling code, so a decoder needs no code of ours. At load the engine runs the model
twice on a few tokens to learn its structure (heads, head sizes, windows, shared keys, merged experts). A model that it
could not compute exactly as transformers does is refused, with the reason, before the first request.

Some models have layers with a recurrent state beside layers with attention: convolutions, linear attention, Mamba 2.
Each running request has a slot for these states. Prefix-cache hits and preempted requests start from snapshots of the
states at block borders, so a hit may be shorter than with attention alone. Such models are served on a CPU. They
exclude `speculative_config`, `batch_invariant`, and LoRA adapters for the recurrent layers. For a GPU set `engine` to
vllm.

Weights are safetensors, or one GGUF file of an architecture that transformers can read (name the file instead of the
folder). [Quantised models](quantization.md) says which quantised checkpoints are served. The others are refused by the
name of their method. If the free memory is too small for weights and KV memory, the engine does not
start.

In transformers some rotary scaling depends on the length of a batch. Here it is fixed at load. `longrope` uses the
short factors if `max_model_len` is at most the model's original length; otherwise it uses the long factors for all
requests. With `dynamic` the context ends where the scaling would begin.

## Tested

Tiny random models in float32. Prompts are cut into chunks, and preemptions and prefix-cache hits are forced. Each model
generates the same tokens as `transformers.generate` for each request alone.

| type | class | special |
|---|---|---|
"""
_REFUSED = """
## Refused

| type | because of | error |
|---|---|---|
"""
_BY_CLASS = """
## Every other decoder of transformers

These are refused by their class, with the same errors (recurrent state, encoder-decoder, or no attention interface):
{ruled_out}.

These have the attention interface or recurrent layers of a known kind. They are loaded unless the check at load refuses
them, but no test runs them:
{untested}.
"""


def render() -> str:
    """The whole document. Takes seconds: it imports every decoder of transformers."""
    tested = "".join(f"| {_type(name, f)} | {_class_name(f)} | {f.special} |\n" for name, f in sorted(FAMILIES.items()))
    refused = "".join(
        f"| {_type(name, f)} | {f.special} | {f.reason.format(model='...')} |\n" for name, f in sorted(REFUSED.items())
    )
    known = {f.model_type for f in (*FAMILIES.values(), *REFUSED.values())}
    others = {True: [], False: []}  # type: dict[bool, list[str]]
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        if config_class.model_type not in known:
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
            may_load = is_hybrid(config_class()) if kind._is_stateful else kind._supports_attention_backend
            others[may_load].append(f"`{config_class.model_type}`")
    lists = _BY_CLASS.format(
        ruled_out=", ".join(sorted(set(others[False]))), untested=", ".join(sorted(set(others[True])))
    )
    return _INTRODUCTION + tested + _REFUSED + refused + lists


def _type(name: str, family: Family) -> str:
    return f"`{family.model_type}`" if name == family.model_type else f"`{family.model_type}` ({name})"


def _class_name(family: Family) -> str:
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family.model_type]].__name__
