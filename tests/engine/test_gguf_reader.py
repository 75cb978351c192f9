"""The header of a GGUF file is read without its vocabulary, and otherwise as gguf's own reader reads it."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from headrace_engine.checkpoints.checkpoint import quick_reads
from headrace_engine.checkpoints.gguf_reader import HeaderReader, end_token_ids, header_for_transformers, read_header

TOKENS = 5000


def write(path: Path, order: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    writer = GGUFWriter(path, "llama", endianess=order)
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_token_list([f"token {number} ü" for number in range(TOKENS)])
    writer.add_token_scores([0.5] * TOKENS)
    writer.add_token_types([1] * TOKENS)
    writer.add_array("llama.short", [3, 1, 4])
    writer.add_vocab_size(TOKENS)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    writer.add_tensor("output.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_all_but_the_vocabulary_is_read_as_by_gguf(tmp_path: Path, order: GGUFEndian) -> None:
    path = write(tmp_path / "tiny.gguf", order)
    ours, theirs = HeaderReader(path), GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].types == field.types
        is_long = len(field.data) >= TOKENS and name != "tokenizer.ggml.tokens"
        assert len(ours.fields[name].data) == (1 if is_long else len(field.data))
        if len(field.data) < TOKENS:
            assert ours.fields[name].contents() == field.contents()
    (tensor,), (expected,) = ours.tensors, theirs.tensors
    assert (tensor.name, tensor.n_elements, tensor.data_offset) == ("output.weight", 64, expected.data_offset)
    np.testing.assert_array_equal(tensor.data, expected.data)


def test_no_value_of_the_vocabulary_is_built(tmp_path: Path) -> None:
    fields = HeaderReader(write(tmp_path / "tiny.gguf")).fields
    assert max(len(field.parts) for field in fields.values()) < 20


@pytest.mark.parametrize("cut", [100, 1000, 50_000, 110_000])
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises((ValueError, IndexError)):
        HeaderReader(path)


def test_an_impossible_number_of_values_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    path.write_bytes(content.replace(TOKENS.to_bytes(8, "little"), (1 << 60).to_bytes(8, "little")))
    with pytest.raises(ValueError, match="the file ends in an array of 1152921504606846976 values"):
        HeaderReader(path)


def test_transformers_gets_the_number_of_tokens_in_place_of_the_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    shown = header_for_transformers(path)
    assert shown.fields["llama.vocab_size"].contents() == TOKENS
    assert max(len(field.data) for field in shown.fields.values()) < 20


def test_tensors_can_be_hidden_from_transformers_only(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    assert header_for_transformers(path, {"output.weight"}).tensors == []
    assert [tensor.name for tensor in read_header(path).tensors] == ["output.weight"]


def test_a_header_is_read_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    first = read_header(path)
    assert read_header(path) is first
    write(path).touch()
    assert read_header(path) is not first


def test_the_digest_of_fields_depends_on_their_values_only(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    before = HeaderReader(path)
    digest, others = before.digest_of("tokenizer."), before.digest_of("general.", "llama.")
    content = path.read_bytes()
    path.write_bytes(content.replace("token 4321 ü".encode(), "token 4322 ü".encode(), 1))
    assert HeaderReader(path).digest_of("tokenizer.") != digest
    assert HeaderReader(path).digest_of("general.", "llama.") == others
    path.write_bytes(content[:-1] + b"\1")  # a weight
    assert HeaderReader(path).digest_of("tokenizer.") == digest


CONTROL, USER_DEFINED = 3, 4


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        (["<s>", "a", "<eos>", "<end_of_turn>"], {"eos": 2}, {2, 3}),
        (["a", "</end>", "</turn>", "</message>"], {"eos": 1, "eot": 2, "eom": 3}, {1, 2, 3}),
        (["a", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], {"eos": 2}, {2, 3, 4}),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": 2}, {0, 2}),
        (["<|start|>", "<|end|>", "<|return|>", "<|call|>"], {"eos": 2}, {2, 3}),
        (["<|user|>", "<|end|>", "<|endoftext|>"], {"eos": 2}, {1, 2}),
        (["a", "b"], {}, set()),
    ],
)
def test_the_end_of_a_turn_ends_an_answer_by_its_key_or_its_name(
    tmp_path: Path, tokens: list[str], keys: dict[str, int], ends: set[int]
) -> None:
    for others in (0, TOKENS):  # a short and a long vocabulary are read by different code
        path = write_tokens(tmp_path / f"{others}.gguf", [*tokens, *(f"token {i}" for i in range(others))], keys)
        assert set(end_token_ids(str(path))) == ends


@pytest.mark.parametrize(("kind", "ends"), [(CONTROL, [0]), (USER_DEFINED, [])])
def test_the_html_tag_of_struck_text_ends_an_answer_only_as_a_control_token(
    tmp_path: Path, kind: int, ends: list[int]
) -> None:
    assert end_token_ids(str(write_tokens(tmp_path / "a.gguf", ["</s>", "a"], {}, [kind, 1]))) == ends


def test_a_file_without_a_vocabulary_names_no_end_token(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "bare.gguf", "llama")
    finish(writer)
    assert end_token_ids(str(tmp_path / "bare.gguf")) == []


def write_tokens(path: Path, tokens: list[str], keys: dict[str, int], types: list[int] | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types or [CONTROL] * len(tokens))
    for key, token_id in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
    finish(writer)
    return path


def test_transformers_uses_the_reader_for_gguf_files_and_only_while_one_is_loaded() -> None:
    with quick_reads("model.gguf"):
        assert gguf.GGUFReader is header_for_transformers
    assert gguf.GGUFReader is GGUFReader
    with quick_reads("folder"):
        assert gguf.GGUFReader is GGUFReader
