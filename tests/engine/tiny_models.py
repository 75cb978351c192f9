"""Tiny models with random weights, one of each attention variety, made on the fly.

Weights are drawn wider than usual, so that logits stand apart and greedy choices are never a coin toss between two
kernels' rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TinyModel:
    name: str
    folder: str
    reference: Any
    """The transformers model, float32."""


VOCAB_SIZE = 384
WINDOW = 20
MAX_POSITIONS = 256

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(name: str) -> Any:
    if name == "llama":
        return transformers.LlamaConfig(**_LLAMA_LIKE)
    if name == "mistral":
        return transformers.MistralConfig(**_LLAMA_LIKE, sliding_window=WINDOW)
    if name == "qwen2":
        return transformers.Qwen2Config(**{**_LLAMA_LIKE, "head_dim": 32, "hidden_size": 128})
    if name == "qwen3":
        return transformers.Qwen3Config(**{**_LLAMA_LIKE, "num_key_value_heads": 1})
    if name == "gemma2":
        return transformers.Gemma2Config(
            **{**_LLAMA_LIKE, "num_hidden_layers": 4},
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        )
    if name == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=MAX_POSITIONS,
            n_embd=64,
            n_layer=3,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    assert name == "opt"
    return transformers.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "opt")


def save_model(name: str, folder: Path) -> Any:
    """Make the model, save it in Hugging Face layout, and return it in float32."""
    torch.manual_seed(ARCHITECTURES.index(name) + 1)
    config = _config(name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.35 if "embed" not in key and "wte" not in key else 1.0)
            elif key.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return model.eval()


TRAINING_TEXT = [
    "The headrace carries water to the mill wheel, and the wheel turns the stone.",
    "A queue is a channel too: it holds what the wheel cannot take yet.",
    "user assistant system hello world how are you fine thank you",
    "Größe, naïve café, 東京, 🙂 emoji and 12345 numbers: all of it is bytes.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'critic' %}{{ raise_exception('critics are not served') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `VOCAB_SIZE` tokens, so that every text is encodable and every id decodable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast
