"""`Grammars`: the grammars of requests in the notation that vLLM takes."""

import json
from collections.abc import Callable
from typing import Any

import llguidance.hf
from llguidance import LLTokenizer
from vllm.sampling_params import StructuredOutputsParams

from headrace_engine.grammar.errors import GrammarError
from headrace_engine.grammar.grammar import GrammarCompiler
from headrace_engine.grammar.text_tokens import as_text
from headrace_engine.requests.request import EngineCoreRequest

_module: Any = llguidance.hf


def _tokenizer(tokenizer_json: str, **options: Any) -> LLTokenizer:
    return LLTokenizer(as_text(tokenizer_json.encode()).decode(), **options)


_module.LLTokenizer = _tokenizer  # vLLM makes its tokenizer for grammars by a function of this module


class Grammars:
    """Writes grammars as Headrace's engine does, so that both engines allow the same outputs.

    vLLM itself ignores whitespace_pattern, reads regular expressions and grammars in another way, and begins a grammar
    after a thought only with a reasoning parser, which resumed requests do not have.
    """

    def __init__(self, create_compiler: Callable[[], GrammarCompiler]) -> None:
        self._create_compiler = create_compiler
        self._compiler: GrammarCompiler | None = None
        self._failure: GrammarError | None = None

    def _load(self) -> None:
        """Create the compiler, once. It reads the whole vocabulary and blocks all threads for a second or two."""
        if self._compiler is None and self._failure is None:
            try:
                self._compiler = self._create_compiler()
            except Exception as error:  # noqa: BLE001  # requests without a grammar are not affected
                self._failure = GrammarError(f"the compiler of grammars could not be created: {error}")

    def of(self, message: EngineCoreRequest) -> StructuredOutputsParams | None:
        """Return the grammar of a request, or None if the request has none.

        Raises GrammarError if the grammar cannot be expressed, or if the tokenizer cannot be used with grammars.
        """
        params = message.sampling_params.structured_outputs
        if params is None:
            return None
        self._load()
        if self._compiler is None:
            assert self._failure is not None
            raise self._failure
        (part,) = json.loads(self._compiler.source(params, message.prompt_token_ids))["grammars"]
        if "json_schema" in part:
            return StructuredOutputsParams(json=json.dumps(part["json_schema"]))
        lark: str = part["lark_grammar"]
        if not lark.startswith("%llguidance"):
            lark = f"%llguidance {{}}\n\n{lark}"  # without this line vLLM may take Lark for GBNF
        return StructuredOutputsParams(grammar=lark)
