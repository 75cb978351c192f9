"""`python convert_gguf.py FILE.gguf FOLDER DTYPE`: SmolLM2's GGUF as a safetensors folder.

Imports nothing of ours, because an interpreter without Headrace may run it.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write config, weights, tokenizer and chat template of a dequantised SmolLM2 into `folder`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF reader builds GPT-2's generic pre-tokenizer. SmolLM splits digits first; a round trip does not show the
    # difference, the ids do: "1  2" is [33, 256, 34].
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    ids = tokenizer("1  2")["input_ids"]
    if ids != [33, 256, 34]:
        raise ValueError(f"the rebuilt tokenizer is wrong: '1  2' became {ids}, expected [33, 256, 34]")
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain now, but transformers keeps the quantizer on the model and then refuses to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
