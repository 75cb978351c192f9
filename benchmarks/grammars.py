"""Memory, and the time of a mask, while thousands of requests use a few forms of structured outputs.

    python benchmarks/grammars.py [--requests 10000] [--tokens 40]

64 requests run at a time, with forms that fill automata: counted texts, long lists of choices, an enum, any object.
Each token is drawn at random from its mask. One request of a hundred continues for 2,000 tokens. No model runs.
"""

import argparse
import json
import random
import resource
import string
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import command_line
from headrace_engine.grammar.errors import GrammarError
from headrace_engine.grammar.grammar import GrammarCompiler, TokenizerDefinition
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams

_AT_ONCE = 64
_LONG_TOKENS = 2000


class Walk:
    """One request. It draws tokens up to its end or its length, and renews its automaton as the engine's core does."""

    def __init__(self, compiler: GrammarCompiler, form: StructuredOutputsParams, num_tokens: int, end: int) -> None:
        self._compiler, self._form, self._num_tokens, self._end = compiler, form, num_tokens, end
        self._token_ids: list[int] = []
        self._grammar = compiler.compile(form)
        self.num_renewals = 0
        self.mask_seconds = 0.0

    def step(self, draw: np.random.Generator) -> bool:
        """Draw a token; return False if the output has ended."""
        started = time.perf_counter()
        try:
            mask = self._grammar.bitmasks()[0]
            self.mask_seconds += time.perf_counter() - started
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            token_id = int(draw.choice(allowed))
            if token_id == self._end or len(self._token_ids) == self._num_tokens:
                return False
            self._token_ids.append(token_id)
            self._grammar.accept([token_id])
        except GrammarError:
            self._grammar = self._compiler.compile(self._form, self._token_ids, self._grammar)
            self.num_renewals += 1
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=command_line.count, default=10_000)
    parser.add_argument("--tokens", type=command_line.count, default=40)
    args = parser.parse_args()
    folder = Path(command_line.default_model.fetch("float32"))
    config = json.loads((folder / "config.json").read_text())
    end = config["eos_token_id"]
    content = (folder / "tokenizer.json").read_bytes()
    definition = TokenizerDefinition(tokenizer_json=content, vocab_size=config["vocab_size"], eos_token_ids=[end])
    compiler, forms, draw = GrammarCompiler(definition), _forms(), np.random.default_rng(1)
    table = Table(
        "requests", "MiB", "us a mask", "renewals a request", title="structured outputs", title_justify="left"
    )
    table.add_row("0", f"{_resident():.0f}", "", "")
    walks: list[Walk] = []
    begun = ended = renewals = tokens = 0
    seconds = 0.0
    while ended < args.requests:
        while len(walks) < _AT_ONCE and begun < args.requests:
            long = begun % 100 == 0
            walks.append(Walk(compiler, forms[begun % len(forms)], _LONG_TOKENS if long else args.tokens, end))
            begun += 1
        for walk in list(walks):
            tokens += 1
            if walk.step(draw):
                continue
            walks.remove(walk)
            ended, renewals, seconds = ended + 1, renewals + walk.num_renewals, seconds + walk.mask_seconds
            if ended % max(args.requests // 10, 1) == 0:
                row = (f"{_resident():.0f}", f"{1e6 * seconds / tokens:.0f}", f"{renewals / ended:.3f}")
                table.add_row(str(ended), *row)
    Console().print(table)
    print(f"most at any time: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    return 0


def _forms() -> list[StructuredOutputsParams]:
    draw = random.Random(1)
    labels = ["".join(draw.choices(string.ascii_letters + " ", k=30)) for _ in range(1000)]
    twelve = {f"field_{number}": {"type": "string", "maxLength": 200 + 50 * number} for number in range(12)}
    return [
        StructuredOutputsParams(json=_object({"summary": {"type": "string", "maxLength": 4000}})),
        StructuredOutputsParams(json=_object({"text": {"type": "string", "maxLength": 65_536}})),
        StructuredOutputsParams(choice=labels),
        StructuredOutputsParams(choice=labels[:500]),
        StructuredOutputsParams(json=_object({"label": {"enum": labels[:900]}})),
        StructuredOutputsParams(json=_object(twelve)),
        StructuredOutputsParams(json_object=True),
    ]


def _object(properties: Mapping[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    raise SystemExit(main())
