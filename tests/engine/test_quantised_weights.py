"""GGUF files are served; a checkpoint that is quantised in a way that is not served is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine.gguf_files import gguf_name
from engine.model_families import COMMON
from engine.tiny_models import save_tokenizer
from headrace_engine import LLM, SamplingParams
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ModelLoadError
from headrace_engine.options.engine_args import EngineArgs


def write_gguf(folder: Path) -> Path:
    """A tiny Qwen2 with its tokenizer in one file, matrices quantised to 8 bits."""
    tokenizer = save_tokenizer(folder)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    config = transformers.Qwen2Config(**{**COMMON, "vocab_size": len(tokens), "hidden_size": 64})
    torch.manual_seed(5)
    model = transformers.Qwen2ForCausalLM(config)
    path = folder / "tiny-Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        values = tensor.normal_(std=0.4).float().numpy() if tensor.dim() > 1 else tensor.float().numpy()
        if tensor.dim() > 1:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for other in folder.glob("*.json"):
        other.unlink()  # the one file must be enough
    return path


def test_a_gguf_file_generates_what_transformers_generates_from_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    llm = LLM(str(path), dtype="float32", num_blocks=40, block_size=16)
    prompts = [[5, 9, 200, 31], [77] * 20]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    reference.generation_config.eos_token_id = None
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    (greeting,) = llm.generate("hello world", SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(greeting.prompt_token_ids) >= 2


def test_a_gguf_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = EngineArgs(model=str(tmp_path / "absent.gguf")).create_engine_config()
    with pytest.raises(ModelLoadError, match=r"absent\.gguf' cannot be read"):
        create_runner(config).load_model()


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        *(({"quant_method": method}, method) for method in ("mxfp4", "bitnet", "torchao", "hqq", "quanto")),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
    ],
)
def test_other_quantised_weights_are_refused_by_the_name_of_their_method(
    quantisation: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**COMMON).to_dict() | {"quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as caught:
        create_runner(EngineArgs(model=str(tmp_path)).create_engine_config()).load_model()
    assert f"is quantised with {named}, which is not supported" in str(caught.value)


def test_a_part_of_a_prompt_without_a_wanted_row_is_multiplied_by_integers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path)
    sizes: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 40, "block_size": 16, "batch_invariant": True}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    whole, parts = (
        LLM(str(path), **sizes, max_num_batched_tokens=tokens).generate([[5, 9, 200, 31] * 20], params, use_tqdm=False)
        for tokens in (128, 32)
    )
    assert whole[0].outputs[0].token_ids == parts[0].outputs[0].token_ids
