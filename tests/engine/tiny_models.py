"""Tiny models with random weights, one of each attention variety, made on the fly.

Weights are drawn wider than usual, so that logits stand apart and greedy choices are never a coin toss between two
kernels' rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.model_families import FAMILIES, VOCAB_SIZE, Family
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_factory import create_tokenizer
from headrace_engine.text.tokenizer_loader import parts_of, read_tokenizer


@dataclass(frozen=True)
class TinyModel:
    name: str
    folder: str
    reference: Any
    """The transformers model, float32."""

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What transformers generates greedily, exactly `max_tokens` tokens."""
        self.reference.generation_config.eos_token_id = None  # references never stop early
        output = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        assert len(tokens) == max_tokens
        return tokens


def generate_greedily(core: EngineCore, requests: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """What a core generates for (prompt, max_tokens), all at once."""
    tokens: list[list[int]] = [[] for _ in requests]
    for index, (prompt, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        core.add_request(
            EngineCoreRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params, seed=0)
        )
    while core.has_work():
        for news in core.step().outputs:
            tokens[int(news.request_id)] += news.new_token_ids
    return tokens


def save_model(family: str | Family, folder: Path) -> Any:
    """Make a family's model, save it in Hugging Face layout, and return it as transformers loads it, in float32."""
    if isinstance(family, str):
        family = FAMILIES[family]
    torch.manual_seed(sum(family.model_type.encode()))
    model = transformers.AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.35 if "embed" not in key and "wte" not in key else 1.0)
            elif key.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


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


def load_model_tokenizer(folder: str, *, trust_remote_code: bool = False) -> ModelTokenizer:
    """Return the tokenizer as a client of the core makes it from its parts."""
    parts = parts_of(read_tokenizer(folder, trust_remote_code=trust_remote_code))
    return create_tokenizer(folder, parts, trust_remote_code=trust_remote_code)


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
