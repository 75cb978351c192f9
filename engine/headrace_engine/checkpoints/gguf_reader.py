"""Reads the headers of GGUF files without the vocabulary, and which tokens end an answer.

The vocabulary is most of a header: 786,000 values for Gemma 3. `gguf.GGUFReader` makes a numpy array of each, which
takes 9 seconds. Only the tokenizer needs them, and transformers reads them for it by other code.
"""

import copy
import functools
import hashlib
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

_LONG_ARRAY: Final = 4096
"""Arrays of a header with more elements describe the vocabulary."""
_STRING_LENGTH_BYTES: Final = 8
_TYPES: Final = {int(kind) for kind in GGMLQuantizationType}
# fmt: off
_END_TOKENS: Final = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>",
        "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# fmt: on
_OPEN_AFTER_END: Final = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Models that have these tokens write `<|end|>` between the parts of an answer."""
_WITHOUT_VOCAB_SIZE: Final = {"gpt2", "starcoder2"}
"""transformers reads no such field for these architectures, and counts the tokens."""
_LONGEST_NAME: Final = max(len(name.encode()) for name in _END_TOKENS)


class HeaderReader(GGUFReader):
    """A reader that passes over the elements of long arrays: each reads as 0 or as ''.

    It knows the number of tokens. All other long arrays seem to have one element.
    """

    data: Any

    def _build_fields(self, offs: int, count: int) -> int:
        self.data = self.data.view(np.ndarray)  # slices of a memmap cost three times as much
        end = int(super()._build_fields(offs, count))
        self._end_of_fields = end
        for name, field in self.fields.items():  # transformers reads each element, and needs the number of tokens
            if len(field.data) > _LONG_ARRAY and name != "tokenizer.ggml.tokens":
                self.fields[name] = field._replace(data=field.data[:1])
        return end

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            size = len(self.data)
            raise ValueError(f"it has {size} bytes and ends within its header: it is truncated; fetch it again")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        count, element = int(length[0]), GGUFValueType(kind[0])
        size = kind.nbytes + length.nbytes
        if count <= _LONG_ARRAY or not (element == GGUFValueType.STRING or element in self.gguf_scalar_to_np):
            return super()._get_field_parts(orig_offs, raw_type)
        if element == GGUFValueType.STRING:
            size += self._bytes_of_strings(orig_offs + size, count)
            omitted: Any = np.empty(0, np.uint8)
        else:
            omitted = np.zeros(1, self.gguf_scalar_to_np[element])
            size += count * omitted.nbytes
        if orig_offs + size > len(self.data):
            raise ValueError(f"the file ends in an array of {count} values, after {len(self.data)} bytes")
        return size, [kind, length, omitted], [2] * count, [GGUFValueType.ARRAY, element]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Check types and sizes first: gguf's own errors do not name the tensor."""
        for field in fields:
            _, name, _, dimensions, number, offset = field.parts
            tensor = f"tensor {bytes(name).decode(errors='replace')!r}"
            if int(number[0]) not in _TYPES:
                raise ValueError(
                    f"{tensor} is of type {int(number[0])}, which this version of the gguf package does not know: "
                    "update it, or convert the model again"
                )
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(number[0])]
            sizes = dimensions.tolist() or [1]
            if sizes[0] % block:
                raise ValueError(
                    f"{tensor} has rows of {sizes[0]} values, which are no whole number of blocks of {block}: "
                    "the file is damaged; convert the model again"
                )
            end = start_offs + int(offset[0]) + math.prod(sizes) // block * size
            if end > len(self.data):
                raise ValueError(
                    f"{tensor} ends at byte {end}, but the file has {len(self.data)} bytes: it is truncated; fetch "
                    "it again"
                )
        super()._build_tensors(start_offs, fields)

    @property
    def _order(self) -> Literal["big", "little"]:
        return "big" if self.byte_order == "S" else "little"

    def _bytes_of_strings(self, start: int, count: int) -> int:
        order, content, at = self._order, memoryview(self.data), start
        for _ in range(count):
            at += _STRING_LENGTH_BYTES + int.from_bytes(content[at : at + _STRING_LENGTH_BYTES], order)
            if at > len(content):
                break  # the caller raises
        return at - start

    def _array_at(self, name: str) -> tuple[int, int]:
        """Return where the elements of an array begin, and their number; 0 elements if there is no such array."""
        field = self.fields.get(name)
        if field is None:
            return 0, 0
        key_length, key, value_type, element_type, count = field.parts[:5]
        begin = field.offset + sum(part.nbytes for part in (key_length, key, value_type, element_type, count))
        return begin, int(count[0])

    def find_tokens(self, names: Collection[str]) -> dict[str, int]:
        """Return the ids of the tokens of the vocabulary that have these names."""
        wanted = {name.encode(): name for name in names}
        order, content = self._order, memoryview(self.data)
        at, count = self._array_at("tokenizer.ggml.tokens")
        found = {}
        for token_id in range(count):
            begin = at + _STRING_LENGTH_BYTES
            at = begin + int.from_bytes(content[at:begin], order)
            if at - begin <= _LONGEST_NAME and (name := wanted.get(bytes(content[begin:at]))) is not None:
                found[name] = token_id
        return found

    @property
    def num_tokens(self) -> int:
        return self._array_at("tokenizer.ggml.tokens")[1]

    def digest_of(self, *prefixes: str) -> bytes:
        """Return a digest of the names and values of all fields whose names begin so."""
        begins = [field.offset for field in self.fields.values()]
        digest = hashlib.blake2b(digest_size=16)
        for field, end in zip(self.fields.values(), [*begins[1:], self._end_of_fields], strict=True):
            if field.name.startswith(prefixes):
                digest.update(memoryview(self.data)[field.offset : end])
        return digest.digest()

    def token_type(self, token_id: int) -> int | None:
        begin, count = self._array_at("tokenizer.ggml.token_type")
        if token_id >= count:
            return None
        return int(self._get(begin + 4 * token_id, np.int32)[0])

    def token_named_by(self, key: str) -> int | None:
        """Return the id that the header has under this key."""
        field = self.fields.get(f"tokenizer.ggml.{key}")
        return None if field is None else int(field.contents())


def end_token_ids(model: str) -> list[int]:
    """Return the tokens that end an answer, as llama.cpp chooses them: by their keys in the header and by name.

    The name counts because many files name only the end of a text, and not the end of a turn. llama.cpp also ends at
    the separators of its infill requests, which are not served here. Source: `src/llama-vocab.cpp` of llama.cpp.
    """
    header = read_header(model)
    named = header.find_tokens(_END_TOKENS)
    if "<|end|>" in named and any(pair <= named.keys() for pair in _OPEN_AFTER_END):
        del named["<|end|>"]
    if "</s>" in named and header.token_type(named["</s>"]) != gguf.TokenType.CONTROL:
        del named["</s>"]  # the tag of HTML, as in Gemma
    by_key = (header.token_named_by(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    return list(dict.fromkeys([*(token_id for token_id in by_key if token_id is not None), *sorted(named.values())]))


def read_header(path: str | os.PathLike[str]) -> HeaderReader:
    """Read a header, or return the one that was read last if it is of the same file. Do not change it."""
    status = os.stat(path)  # noqa: PTH116  # `path` may be a text
    return _read(os.fspath(path), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _read(path: str, _identity: tuple[int, ...]) -> HeaderReader:
    return HeaderReader(path)


def header_for_transformers(path: str | os.PathLike[str], omitted: Collection[str] = ()) -> HeaderReader:
    """Return a header that transformers reads in a short time.

    transformers converts each token to count them. So the number of tokens is a field of its own, and the tokens are
    reduced to one.

    Args:
        omitted: names of tensors that it does not show.
    """
    header = copy.copy(read_header(path))
    header.tensors = [tensor for tensor in header.tensors if tensor.name not in omitted]
    header.fields = header.fields.copy()
    tokens = header.fields.get("tokenizer.ggml.tokens")
    architecture = header.fields.get("general.architecture")
    if tokens is None or architecture is None or architecture.contents() in _WITHOUT_VOCAB_SIZE:
        return header
    name = f"{architecture.contents()}.vocab_size"
    size = ReaderField(0, name, [np.array([len(tokens.data)], np.uint32)], [0], [GGUFValueType.UINT32])
    header.fields.setdefault(name, size)
    header.fields["tokenizer.ggml.tokens"] = tokens._replace(data=tokens.data[:1])
    return header


@contextmanager
def without_vocabulary() -> Iterator[None]:
    """Let transformers read the configuration and weights of GGUF files by `header_for_transformers`.

    transformers takes the class from the `gguf` package at each load, and has no argument for another one. It also
    builds the same map of tensor names again for each module of a model. That map is cached here. Its other reader
    takes slices of a memmap, which cost thirty times as much as those of an array.
    """
    from transformers.integrations.gguf import reader

    name_map, mapped = gguf.get_tensor_name_map, reader._mapped
    gguf.GGUFReader, gguf.get_tensor_name_map = header_for_transformers, functools.cache(name_map)
    reader._mapped = lambda path: mapped(path).view(np.ndarray)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, reader._mapped = GGUFReader, name_map, mapped
