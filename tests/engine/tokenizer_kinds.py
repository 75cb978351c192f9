"""Small real tokenizers of each kind that decoders come with, for texts of all scripts."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The mill wheel turns: Größe, naïve café!",
    "नमस्ते दुनिया, चक्की का पहिया घूमता है।",
    "မင်္ဂလာပါ ကမ္ဘာလောက",
    "สวัสดีชาวโลก กังหันน้ำหมุน",
    "東京 水車が回る。你好世界",
    "안녕 세상 🙂🦀 👩‍👩‍👧 \U0001d518\U0001d52b\U0001d526",
    "  two  spaces\n\tand a tab ",
    "a\ufffdb \ufffd\ufffd",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
LATIN = "The mill wheel turns and the wheel turns the stone: a queue is a channel too, with two spaces."


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen: tokens are bytes, and most characters outside ASCII several of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([LATIN, *TEXTS], trainer)  # merges end inside of characters, too
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and TinyLlama: a space is ▁, and what the vocabulary lacks is bytes."""
    tokenizer = _trained_with_bytes()
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_fallback_metaspace() -> Tokenizer:
    """As newer Mistral: the same with a pre-tokenizer."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    return tokenizer


def byte_fallback_kept_space() -> Tokenizer:
    """As Gemma: no space is put before a text, and none is taken away."""
    tokenizer = _trained_with_bytes()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _trained_with_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([LATIN], trainer)
    made = json.loads(tokenizer.to_str())
    vocabulary = made["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    made["model"] |= {"byte_fallback": True, "fuse_unk": True}
    made["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(made))


def unigram() -> Tokenizer:
    """As T5: SentencePiece's unigrams without bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([LATIN, *TEXTS], trainer)
    return tokenizer


def unigram_with_bytes() -> Tokenizer:
    """SentencePiece's unigrams with bytes for what the vocabulary lacks."""
    made = json.loads(unigram().to_str())
    pieces = [piece for piece in made["model"]["vocab"] if piece[0] in SPECIAL or piece[0].isascii() or "▁" in piece[0]]
    pieces += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    made["model"] |= {"vocab": pieces, "byte_fallback": True}
    made["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, made["decoder"]]}
    return Tokenizer.from_str(json.dumps(made))


def word_piece() -> Tokenizer:
    """As BERT: parts of a word begin with ##, and decoding puts a space before every other token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([LATIN, *TEXTS], trainer)
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: tokens stand side by side with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.train_from_iterator([LATIN, *TEXTS], trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return tokenizer


def word_suffixes() -> Tokenizer:
    """As the first GPT: the end of a word is in its last token, so a space depends on the next one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.decoder = decoders.BPEDecoder()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([LATIN, *TEXTS], trainer)
    return tokenizer


KINDS: list[Callable[[], Tokenizer]] = [
    byte_level,
    byte_fallback,
    byte_fallback_metaspace,
    byte_fallback_kept_space,
    unigram,
    unigram_with_bytes,
    word_piece,
    words,
    word_suffixes,
]


def add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """With added tokens, one of them special."""
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer
