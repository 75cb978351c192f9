"""Tokenizers of GGUF files: built by transformers once, kept on disk, and equal to what transformers builds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.text import tokenizer_loader
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_cache import TokenizerCache
from headrace_engine.text.tokenizer_json import compacted
from headrace_engine.text.tokenizer_parts import TokenizerParts

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
TEMPLATE = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
PARTS = TokenizerParts(tokenizer_json=b'{"model": "\xc3\xbc"}', special_tokens={"bos_token": "<s>"}, eos_token_id=3)
WORDS = ["the", "mill", "wheel", "turns", "12", "345", "über", "水車", "\n\n", "(", ") [", '","', "#version"]


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Tokens with scores, as Llama 2 and Gemma have them: no merges are listed."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|user|>", "<think>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [CONTROL] * 5 + [USER_DEFINED] + [BYTE] * 256
    pieces = ["▁", *'abcdefghijklmnopqrstuvwxyzü0123456789水車()[]#,."\n']
    for word in WORDS:
        for end in range(2, len(word) + 1):
            pieces += [word[:end], f"▁{word[:end]}"]
    pieces += ["▁▁", "  ", "   "]
    pieces = list(dict.fromkeys(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + pieces)
    writer.add_token_scores([0.0] * len(tokens) + [-float(number) for number in range(len(pieces))])
    writer.add_token_types(kinds + [NORMAL] * len(pieces))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def byte_level(pre: str) -> Any:
    """Tokens and merges in the alphabet of bytes, as Llama 3 and SmolLM2 have them."""

    def add(writer: gguf.GGUFWriter) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens, merges = ["<|endoftext|>", "<|user|>", "<think>", *alphabet], []
        backend = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for word in WORDS:
            for text in (word, f" {word}"):
                spelled = backend.pre_tokenize_str(text)[0][0]
                for end in range(2, len(spelled) + 1):
                    if spelled[:end] not in tokens:
                        tokens.append(spelled[:end])
                        merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    return add


VOCABULARIES = {
    "gemma3": ("gemma3", sentencepiece),
    "llama-2": ("llama", sentencepiece),
    "llama-3": ("llama", byte_level("llama-bpe")),
    "smollm": ("llama", byte_level("smollm")),
}


@pytest.fixture(scope="module", params=VOCABULARIES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    return write_vocabulary(folder / f"{request.param}.gguf", *VOCABULARIES[request.param])


def write_vocabulary(path: Path, architecture: str, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    writer.add_chat_template(TEMPLATE)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    return tokenizer_loader.read_tokenizer(str(file), trust_remote_code=False)


@pytest.fixture(scope="module", autouse=True)
def _caches_small_vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(tokenizer_loader, "_LARGE_VOCABULARY", 0)
        yield


def load(path: Path) -> TokenizerParts:
    return tokenizer_loader.load_tokenizer(EngineArgs(model=str(path)).create_engine_config())


@pytest.fixture(scope="module")
def cached(file: Path) -> ModelTokenizer:
    """The tokenizer at the second load. transformers cannot have built it."""
    load(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_loader, "read_tokenizer", None)
        return ModelTokenizer(load(file))


texts = st.lists(st.sampled_from([*WORDS, *(f" {word}" for word in WORDS), "<think>", "<|user|>", "<bos>"]) | st.text())


@settings(max_examples=40, deadline=None)
@given(texts.map("".join))
def test_a_cached_tokenizer_makes_the_tokens_of_transformers(cached: ModelTokenizer, reference: Any, text: str) -> None:
    ids = reference(text, add_special_tokens=True)["input_ids"]
    assert cached.encode(text) == ids
    assert cached.encode_plain(text) == reference(text, add_special_tokens=False)["input_ids"]
    assert cached.decode(ids) == reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_a_cached_tokenizer_has_the_chat_template_and_the_special_tokens(
    cached: ModelTokenizer, reference: Any
) -> None:
    chat = [{"role": "user", "content": "the <think> wheel"}]
    text = reference.apply_chat_template(chat, tokenize=False)
    assert cached.encode_chat(chat) == (text, reference(text, add_special_tokens=False)["input_ids"])
    assert cached.eos_token_id == reference.eos_token_id


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2", " ", "3", "4", "5"]), ("gpt-2", ["12", " ", "345"])])
def test_digits_are_split_where_the_file_asks_for_it(pre: str, pieces: list[str], tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.gguf", "llama", byte_level(pre))
    tokenizer = ModelTokenizer(load(path))
    assert [tokenizer.decode([token]) for token in tokenizer.encode_plain("12 345")] == pieces


@pytest.mark.parametrize("pre", ["deepseek-v3", "default"])
def test_an_unknown_way_to_split_texts_is_named_at_each_load(
    pre: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.gguf", "llama", byte_level(pre))
    for _ in ("built", "from the cache"):
        caplog.clear()
        load(path)
        (message,) = caplog.messages
        assert f"tokenizer.ggml.pre of {path} is '{pre}', which is unknown" in message
        assert "--tokenizer" in message


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_known_way_to_split_texts_gives_no_warning(
    pre: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(write_vocabulary(tmp_path / "vocabulary.gguf", "llama", byte_level(pre)))
    load(write_vocabulary(tmp_path / "sentencepiece.gguf", "llama", sentencepiece))
    assert caplog.messages == []


def test_another_vocabulary_is_another_entry(file: Path, tmp_path: Path) -> None:
    load(file)
    changed = tmp_path / file.name
    changed.write_bytes(file.read_bytes().replace(b"<think>", b"<thunk>"))
    assert load(changed).tokenizer_json != load(file).tokenizer_json


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:-9] + b"\0" + c[-8:]])
def test_a_damaged_entry_counts_as_none_and_is_written_again(damage: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = TokenizerCache(b"source", "1")
    cache.write(PARTS)
    (entry,) = (tmp_path / "headrace" / "tokenizers").iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache.read() is None
    cache.write(PARTS)
    assert cache.read() == PARTS


def test_an_entry_is_for_one_source_and_one_set_of_versions(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    TokenizerCache(b"source", "1").write(PARTS)
    assert TokenizerCache(b"source", "2").read() is None
    assert TokenizerCache(b"other", "1").read() is None


def test_a_reader_never_sees_a_part_of_what_several_writers_write(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, done = TokenizerCache(b"source", "1"), threading.Event()
    cache.write(PARTS)

    def write() -> None:
        while not done.is_set():
            cache.write(PARTS)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        assert all(cache.read() == PARTS for _ in range(100))
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert len(list((tmp_path / "headrace" / "tokenizers").iterdir())) == 1


def test_an_entry_that_another_user_may_write_counts_as_none(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = TokenizerCache(b"source", "1")
    cache.write(PARTS)
    (entry,) = (tmp_path / "headrace" / "tokenizers").iterdir()
    entry.chmod(0o666)
    assert cache.read() is None


pieces = st.text(st.sampled_from('ab,["]\\\n\u2581é水🙂#')).filter(bool)


@given(st.lists(st.tuples(pieces, pieces), min_size=1))
def test_compact_merges_are_the_same_merges(pairs: list[tuple[str, str]]) -> None:
    tokens = dict.fromkeys([*(part for pair in pairs for part in pair), *("".join(pair) for pair in pairs)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    written = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs)).to_str()
    assert Tokenizer.from_buffer(compacted(written)).to_str() == written
    assert isinstance(json.loads(compacted(written))["model"]["merges"][0], str)


@pytest.mark.parametrize("left", [" ", "#version"])
def test_merges_that_the_old_form_cannot_express_keep_their_form(left: str) -> None:
    vocabulary = {left: 0, "a": 1, f"{left}a": 2}
    written = Tokenizer(models.BPE(vocab=vocabulary, merges=[(left, "a")])).to_str()
    assert compacted(written) == written.encode()
