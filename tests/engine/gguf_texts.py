"""Compares greedy texts of Headrace with those of llama.cpp, on the same GGUF file.

    python -m engine.gguf_texts FILE PROGRAMS

Run it in the folder `tests`. PROGRAMS is the folder of llama.cpp's programs. They run with the file as it is, and with
the file dequantised to float32. Two runs that round differently choose other tokens where the best logits are close. So
at the first token that differs, each run's preference for its own token is printed. The noise is the root mean square
of the difference between both runs, in the preference for the best token over the second best, along llama.cpp's text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine import llamacpp
from headrace_engine import LLM, SamplingParams

_PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Photosynthesis ist der Vorgang, bei dem",
)
_NEW_TOKENS = 64
_BEST = 10


class Text(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    best: list[dict[int, float]]
    """The log-probabilities of the best tokens at each position, the best one first."""


def llamacpp_texts(programs: Path, file: Path, options: tuple[str, ...] = ()) -> list[Text]:
    found = []
    with llamacpp.server(programs, file, options):
        for prompt in _PROMPTS:
            ids = llamacpp.ask("/tokenize", {"content": prompt, "add_special": True})["tokens"]
            body = {"prompt": ids, "n_predict": _NEW_TOKENS, "temperature": 0, "n_probs": _BEST, "cache_prompt": False}
            answer = llamacpp.ask("/completion", {**body, "ignore_eos": True, "return_tokens": True})
            best = [
                {each["id"]: each["logprob"] for each in position["top_logprobs"]}
                for position in answer["completion_probabilities"]
            ]
            found.append(Text(ids, answer["tokens"], best))
    return found


def own_texts(llm: LLM) -> list[Text]:
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=_BEST)
    found = []
    for output in llm.generate(list(_PROMPTS), params, use_tqdm=False):
        assert output.outputs[0].logprobs is not None
        best = [{token: entry.logprob for token, entry in one.items()} for one in output.outputs[0].logprobs]
        found.append(Text(list(output.prompt_token_ids), list(output.outputs[0].token_ids), best))
    return found


def best_after(llm: LLM, text: Text) -> list[dict[int, float]]:
    """Return the best tokens at each position of another run's text."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=_BEST)
    (output,) = llm.generate([{"prompt_token_ids": text.prompt + text.tokens}], params, use_tqdm=False)
    entries: Any = output.prompt_logprobs
    return [{token: entry.logprob for token, entry in one.items()} for one in entries[len(text.prompt) :]]


def preference(best: dict[int, float], chosen: int, other: int) -> float:
    """Return by how much a run prefers a token; at least, if the other one is not among the best."""
    return best[chosen] - best.get(other, min(best.values()))


def noise(theirs: list[dict[int, float]], own: list[dict[int, float]]) -> float:
    changes = []
    for their, our in zip(theirs, own, strict=True):
        first, second = sorted(their, key=lambda token: -their[token])[:2]
        if first in our and second in our:
            changes.append(preference(our, first, second) - preference(their, first, second))
    return float(np.sqrt(np.mean(np.square(changes))))


def report(name: str, llm: LLM, theirs: list[Text]) -> None:
    for their, our in zip(theirs, own_texts(llm), strict=True):
        assert our.prompt == their.prompt, f"llama.cpp has the prompt {their.prompt}, Headrace {our.prompt}"
        spread = f"noise {noise(their.best, best_after(llm, their)):.4f}"
        pairs = zip(their.tokens, our.tokens, strict=True)
        at = next((index for index, (one, two) in enumerate(pairs) if one != two), _NEW_TOKENS)
        line = f"{name:32} {at:2} of {_NEW_TOKENS} tokens are equal, {spread}"
        if at < _NEW_TOKENS:
            their_token, our_token = their.tokens[at], our.tokens[at]
            line += (
                f"; then llama.cpp prefers {their_token} to {our_token} by "
                f"{preference(their.best[at], their_token, our_token):.4f}, Headrace the other by "
                f"{preference(our.best[at], our_token, their_token):.4f}"
            )
        print(line, flush=True)  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("programs", type=Path)
    options = parser.parse_args()
    theirs = {"llama.cpp": llamacpp_texts(options.programs, options.file)}
    with tempfile.TemporaryDirectory() as folder:
        dequantised = Path(folder) / "dequantised.gguf"
        llamacpp.quantise(options.programs, options.file, dequantised, "F32")
        theirs["llama.cpp, dequantised"] = llamacpp_texts(options.programs, dequantised, llamacpp.EXACT)
    for dtype in ("bfloat16", "float32"):
        llm = LLM(str(options.file), dtype=dtype, max_model_len=256)
        for name, texts in theirs.items():
            report(f"{dtype}, {name}", llm, texts)


if __name__ == "__main__":
    main()
