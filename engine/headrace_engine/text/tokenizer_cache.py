"""Keeps tokenizers that transformers took long to build, in a private folder of the user's cache.

For the 262,144 tokens of Gemma 3 in a GGUF file, transformers takes 10 seconds of a processor and 350 MB.
"""

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgpack

from headrace_engine.system.private_folder import first_private, read_private
from headrace_engine.text.tokenizer_parts import TokenizerParts

logger = logging.getLogger(__name__)

_DIGEST_BYTES: Final = 16


class TokenizerCache:
    """The place of one tokenizer. A damaged entry counts as none.

    Args:
        source: a digest of what the tokenizer is built from.
        versions: the versions of what builds it.
    """

    def __init__(self, source: bytes, versions: str) -> None:
        self._name = hashlib.blake2b(source + versions.encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def read(self) -> TokenizerParts | None:
        """Return the tokenizer; None if there is none."""
        try:
            content = read_private(self._folder() / self._name)
        except OSError:
            return None
        digest, data = content[:_DIGEST_BYTES], memoryview(content)[_DIGEST_BYTES:]
        if _digest(data) != digest:
            return None
        return TokenizerParts(**msgpack.unpackb(data))

    def write(self, parts: TokenizerParts) -> None:
        """Keep a tokenizer. Several processes may do so at the same time. Does nothing if there is no room."""
        data: bytes = msgpack.packb(asdict(parts))
        with suppress(OSError):
            folder = self._folder()
            descriptor, name = tempfile.mkstemp(dir=folder)
            try:
                with open(descriptor, "wb") as file:  # noqa: PTH123
                    file.write(_digest(data) + data)
                os.replace(name, folder / self._name)  # noqa: PTH105  # a reader sees all of it or nothing
            except OSError:
                os.unlink(name)  # noqa: PTH108
                raise

    @staticmethod
    def _folder() -> Path:
        return first_private("tokenizers", logger.info)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
