"""Runs llama.cpp's programs on a GGUF file, for comparisons with Headrace. No test needs them.

Each function takes the folder with llama-quantize, llama-perplexity and llama-server. They were written for b11434.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np

_PORT = 18089
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
"""Options that keep attention and the KV cache in float32. By default both are in float16."""


class Perplexity(NamedTuple):
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    """[chunks, tokens of a chunk], as llama.cpp's tokenizer gives them, without a BOS for each chunk."""
    log_probabilities: np.ndarray[Any, np.dtype[np.float64]]
    """Of the tokens in second halves, rounded to 16 bits. None is lower than the likeliest token's by more than 16."""
    perplexity: float
    """Of the same tokens, not rounded."""


def quantise(programs: Path, source: Path, target: Path, kind: str) -> None:
    """Write the tensors of a file in another type, such as Q4_K_M. Packed ones are dequantised first."""
    command: list[Any] = [programs / "llama-quantize", "--allow-requantize", source, target, kind]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def perplexity(
    programs: Path, file: Path, text: str, context: int, chunks: int, options: tuple[str, ...]
) -> Perplexity:
    """Measure the first chunks of a text, each of `context` tokens, by llama-perplexity."""
    with tempfile.TemporaryDirectory() as folder:
        written, logits = Path(folder) / "text", Path(folder) / "logits"
        written.write_text(text)
        sizes = ["-c", str(context), "-b", str(context), "--chunks", str(chunks)]
        command: list[Any] = [
            programs / "llama-perplexity",
            "-m",
            file,
            "-f",
            written,
            "--save-all-logits",
            logits,
            *sizes,
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        printed = (done.stdout + done.stderr).partition("Final estimate: PPL = ")[2].split()[0]
        return Perplexity(*_read_logits(logits), float(printed))


def _read_logits(path: Path) -> tuple[Any, Any]:
    """Read what `process_logits` of llama.cpp's tools/perplexity/perplexity.cpp writes."""
    magic, (context, vocab, chunks) = 8, np.fromfile(path, np.int32, 3, offset=8)
    tokens = np.fromfile(path, np.int32, chunks * context, offset=magic + 12).reshape(chunks, context)
    counted = context - 1 - context // 2
    head = magic + 12 + tokens.nbytes
    row = 4 + 2 * math.ceil(vocab / 2)  # two floats, and a number of 16 bits for each token of the vocabulary
    rows = np.memmap(path, np.uint16, offset=head, shape=(chunks, counted, row))
    scale, least = np.ascontiguousarray(rows[..., :4]).view(np.float32).astype(float).transpose(2, 0, 1)
    steps = np.take_along_axis(rows, 4 + tokens[:, context // 2 + 1 :, None], 2)[..., 0]
    return tokens, (least + scale * steps).ravel()


@contextmanager
def server(programs: Path, file: Path, options: tuple[str, ...]) -> Iterator[None]:
    """Serve a file with one slot while the block runs."""
    command: list[Any] = [
        programs / "llama-server",
        "-m",
        file,
        "--port",
        str(_PORT),
        "-np",
        "1",
        "-c",
        "1024",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                with urlopen(f"http://127.0.0.1:{_PORT}/health"):
                    break
            except OSError:
                time.sleep(0.1)
        if process.returncode is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        yield
    finally:
        process.terminate()
        process.wait()


def ask(path: str, body: dict[str, Any]) -> Any:
    """Return the server's answer to a request."""
    request = Request(
        f"http://127.0.0.1:{_PORT}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request) as answer:
        return json.load(answer)
