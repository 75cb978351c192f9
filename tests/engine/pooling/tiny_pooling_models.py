"""Tiny folders with random weights, as sentence-transformers writes them: one for each architecture and module.

A folder depends on its name only, so expected numbers can be recorded from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 300
SIZE = 32
MAX_TOKENS = 60

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 2, "eos_token_id": 3}
_ROBERTA: dict[str, Any] = {**_COMMON, "pad_token_id": 1, "type_vocab_size": 1}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _COMMON),
    "roberta": ("Roberta", _ROBERTA),
    "xlm-roberta": ("XLMRoberta", _ROBERTA),
    "camembert": ("Camembert", _ROBERTA),
    "distilbert": (
        "DistilBert",
        {"dim": SIZE, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": VOCAB_SIZE, "pad_token_id": 0},
    ),
    "electra": ("Electra", {**_COMMON, "embedding_size": 24}),
    "albert": ("Albert", {**_COMMON, "embedding_size": 16}),
    "mpnet": ("MPNet", {**_COMMON, "pad_token_id": 1}),
    "modernbert": (
        "ModernBert",
        {**_COMMON, "num_attention_heads": 2, "local_attention": 16, "global_attn_every_n_layers": 3},
    ),
    "nomic_bert": ("NomicBert", _COMMON),
    "gte": ("Gte", {**_COMMON, "type_vocab_size": 2}),
    "deberta-v2": (
        "DebertaV2",
        {**_COMMON, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p"]},
    ),
    "qwen3": ("Qwen3", _DECODER),
    "gemma3_text": (
        "Gemma3Text",
        {
            **_DECODER,
            "use_bidirectional_attention": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Name -> prefix of transformers' classes, and options of the configuration."""
WORDS = (
    "the a of to in water wheel mill queue river lake stone turns holds carries what cannot take yet channel head race",
    "capital france paris rome italy is was great product bad love hate",
)


def words() -> list[str]:
    return " ".join(WORDS).split()


def build(
    folder: Path,
    architecture: str,
    *,
    suffix: str = "Model",
    config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    seed: int = 0,
) -> Any:
    """Save a random model and a tokenizer. Return the model."""
    name, options = ARCHITECTURES[architecture]
    kind = getattr(transformers, name + suffix)
    torch.manual_seed(seed + sum(architecture.encode()))
    model = kind(kind.config_class(**{**options, **(config or {})})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "embed" in key else 0.2)
            elif key.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    style = "roberta" if options.get("pad_token_id") == 1 else "decoder" if "bos_token_id" in options else "bert"
    save_tokenizer(folder, style, chat_template)
    return model


def save_tokenizer(folder: Path, style: str, chat_template: str | None = None) -> None:
    """Save a tokenizer of words and characters, with the special tokens of a family."""
    first, last = ("<s>", "</s>") if style == "roberta" else ("[CLS]", "[SEP]")
    special = [first, "<pad>", last, "[UNK]"] if style == "roberta" else ["<pad>", "[UNK]", first, last]
    special += ["<|q|>", "<|d|>", "<|a|>", "yes", "no"]
    letters = [chr(code) for code in (*range(33, 48), *range(97, 123), 0xE9, 0xF6, 0x6771, 0x4EAC)]
    pieces = [*letters, *("##" + letter for letter in letters), *words()]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*special, *pieces]))}
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["<|q|>", "<|d|>", "<|a|>"])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=style != "decoder")  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokens = [(first, vocabulary[first]), (last, vocabulary[last])]
    single, pair = {
        "bert": (f"{first} $A {last}", f"{first} $A {last} $B:1 {last}:1"),
        "roberta": (f"{first} $A {last}", f"{first} $A {last} {last} $B {last}"),
        "decoder": (f"$A {last}", f"$A $B {last}"),
    }[style]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="[UNK]",
        cls_token=first if style != "decoder" else None,
        sep_token=last if style != "decoder" else None,
        eos_token=last if style == "decoder" else None,
        model_max_length=512,
        model_input_names=["input_ids", *(["token_type_ids"] if style == "bert" else []), "attention_mask"],
        chat_template=chat_template,
    ).save_pretrained(folder)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


_OF_MODULES = "sentence_transformers.models."


def add_modules(
    folder: Path,
    modules: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    about: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> None:
    """Write modules.json, and the modules after the transformer with random weights."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": _OF_MODULES + "Transformer"}]
    for number, (name, config) in enumerate(modules, 1):
        path = f"{number}_{name}"
        entries.append({"idx": number, "name": str(number), "path": path, "type": _OF_MODULES + name})
        write(folder / path / "config.json", config)
        torch.manual_seed(seed + number)
        if name == "Dense":
            weights = {"linear.weight": torch.randn(config["out_features"], config["in_features"]) * 0.3}
            if config.get("bias", True):
                weights["linear.bias"] = torch.randn(config["out_features"]) * 0.3
            if config.get("use_residual") and config["in_features"] != config["out_features"]:
                weights["residual.weight"] = torch.randn(config["out_features"], config["in_features"]) * 0.3
            save_file(weights, folder / path / "model.safetensors")
        if name == "LayerNorm":
            size = config["dimension"]
            save_file(
                {"norm.weight": torch.randn(size) + 1, "norm.bias": torch.randn(size)},
                folder / path / "model.safetensors",
            )
    write(folder / "modules.json", entries)
    write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": None, **(about or {})})


Module = tuple[str, Mapping[str, Any]]


def pooling(mode: str | Sequence[str] = "mean", **options: Any) -> Module:
    return "Pooling", {"embedding_dimension": SIZE, "pooling_mode": mode, **options}


def dense(in_features: int, out_features: int, activation: str = "activation.Tanh", **options: Any) -> Module:
    return "Dense", {
        "in_features": in_features,
        "out_features": out_features,
        "bias": True,
        "activation_function": "torch.nn.modules." + activation,
        **options,
    }


NORMALIZE: Module = ("Normalize", {})
IDENTITY = "linear.Identity"
_OLD_POOLING: Module = (
    "Pooling",
    {
        "word_embedding_dimension": SIZE,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
)
_PROMPTS = {"prompts": {"query": "what is ", "document": "the "}, "default_prompt_name": "query"}
_ALL_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<|a|> {{ m.content }} {% endif %}"
    "{% if m.role == 'query' %}<|q|> {{ m.content }} {% endif %}"
    "{% if m.role == 'document' %}<|d|> {{ m.content }} {% endif %}{% endfor %}<|a|>"
)

EMBEDDERS: dict[str, Callable[[Path], None]] = {}
"""Name -> writes a folder that SentenceTransformer reads."""
SCORERS: dict[str, Callable[[Path], None]] = {}
"""Name -> writes a folder that CrossEncoder reads."""


def _embedder(name: str, architecture: str, modules: Sequence[Module] | None, **options: Any) -> None:
    def make(folder: Path) -> None:
        build(folder, architecture, config=options.get("config"))
        if modules is not None:
            add_modules(folder, modules, about=options.get("about"))

    EMBEDDERS[name] = make


for _name in ARCHITECTURES:
    _last = _name == "qwen3"
    _embedder(_name, _name, [pooling("lasttoken" if _last else "mean"), NORMALIZE])
for _mode in _ALL_MODES:
    _embedder(f"pooling-{_mode}", "bert", [pooling(_mode)])
_embedder("two-modes", "roberta", [pooling(["mean", "cls"]), NORMALIZE])
_embedder("old-keys", "bert", [_OLD_POOLING, NORMALIZE])
_embedder("no-modules", "bert", None)
_embedder("prompt-left-out", "bert", [pooling("mean", include_prompt=False), NORMALIZE], about=_PROMPTS)
_embedder("prompt-pooled", "gemma3_text", [pooling("mean"), NORMALIZE], about=_PROMPTS)
_embedder("two-dense", "gemma3_text", [pooling(), dense(SIZE, 64, IDENTITY, bias=False), dense(64, 24), NORMALIZE])
_embedder(
    "dense-residual", "bert", [pooling(), dense(SIZE, SIZE, use_residual=True), dense(SIZE, 16, use_residual=True)]
)
_embedder("layer-norm", "bert", [pooling("cls"), ("LayerNorm", {"dimension": SIZE}), ("Dropout", {"dropout": 0.1})])


def _scorer(name: str, architecture: str, labels: int, **config: Any) -> None:
    def make(folder: Path) -> None:
        build(folder, architecture, suffix="ForSequenceClassification", config={"num_labels": labels, **config})

    SCORERS[name] = make


for _name in ARCHITECTURES:
    _scorer(f"{_name}-1", "gemma3_text" if _name == "gemma3_text" else _name, 1)
_scorer("bert-3", "bert", 3)
_scorer("modernbert-mean", "modernbert", 2, classifier_pooling="mean")
_scorer("activation", "bert", 1, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})


def _logit_score(folder: Path) -> None:
    build(folder, "qwen3", suffix="ForCausalLM", chat_template=CHAT_TEMPLATE)
    write(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
    )
    text = {"method": "forward", "method_output_name": "logits"}
    write(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation",
            "modality_config": {"text": text, "message": {**text, "format": "flat"}},
            "module_output_name": "causal_logits",
            "max_seq_length": MAX_TOKENS,
        },
    )
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    write(
        folder / "1_LogitScore" / "config.json",
        {"true_token_id": vocabulary["yes"], "false_token_id": vocabulary["no"], "module_input_name": "causal_logits"},
    )
    write(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder", "prompts": {}})


SCORERS["logit-score"] = _logit_score
