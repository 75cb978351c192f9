"""Writes a Llama of random weights as a GGUF file in bfloat16, with a vocabulary that llama.cpp accepts.

    python benchmarks/random_gguf.py 1B FILE

The shapes are those of Llama-3.2-1B and 3B and of SmolLM2-135M. What a step costs does not depend on the values of
the weights.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, outputs and inputs of each matrix. The LM head is tied to the embedding."""
        yield "token_embd", self.vocabulary, self.hidden
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_q", self.heads * self.head_dim, self.hidden
            yield f"blk.{layer}.attn_k", self.kv_heads * self.head_dim, self.hidden
            yield f"blk.{layer}.attn_v", self.kv_heads * self.head_dim, self.hidden
            yield f"blk.{layer}.attn_output", self.hidden, self.heads * self.head_dim
            yield f"blk.{layer}.ffn_gate", self.intermediate, self.hidden
            yield f"blk.{layer}.ffn_up", self.intermediate, self.hidden
            yield f"blk.{layer}.ffn_down", self.hidden, self.intermediate

    def norms(self) -> Iterator[str]:
        yield "output_norm"
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm"
            yield f"blk.{layer}.ffn_norm"


SHAPES = {
    "135M": Shape(576, 1536, 30, 9, 3, 64, 49152),
    "1B": Shape(2048, 8192, 16, 32, 8, 64, 128256),
    "3B": Shape(3072, 8192, 28, 24, 8, 128, 128256),
}


def write(shape: Shape, path: Path) -> None:
    """Write the file. The same shape gives the same bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    writer.add_context_length(8192)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    _add_vocabulary(writer, shape.vocabulary)
    half = gguf.GGMLQuantizationType.BF16
    for name, outputs, inputs in shape.matrices():
        size = outputs * inputs
        writer.add_tensor_info(f"{name}.weight", (outputs, inputs), torch.zeros(1).numpy().dtype, 2 * size, half)
    for name in shape.norms():
        writer.add_tensor_info(f"{name}.weight", (shape.hidden,), torch.zeros(1).numpy().dtype, 4 * shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = torch.Generator().manual_seed(0)
    for _, outputs, inputs in shape.matrices():
        weights = torch.empty(outputs, inputs).normal_(0.0, 0.02, generator=draw)
        writer.write_tensor_data(weights.bfloat16().view(torch.int16).numpy())
    for _ in shape.norms():
        writer.write_tensor_data(torch.ones(shape.hidden).numpy())
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    kinds = gguf.TokenType
    special = ["<unk>", "<s>", "</s>"]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"\u2581w{index}" for index in range(size - len(special) - len(data))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *data, *words])
    writer.add_token_scores([0.0] * (len(special) + len(data)) + [-1.0 * index for index in range(len(words))])
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * len(data), *[kinds.NORMAL] * len(words)]
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    write(SHAPES[args.shape], args.file)
