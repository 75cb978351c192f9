"""Reads the tokenizer of a pooling model as sentence-transformers does."""

from dataclasses import replace
from typing import Any

from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers

from headrace_engine.checkpoints.pooling_folder import read_pooling_spec
from headrace_engine.options.config import EngineConfig
from headrace_engine.text.tokenizer_loader import parts_of, read_tokenizer_of
from headrace_engine.text.tokenizer_parts import TokenizerParts


def load_pooling_tokenizer(config: EngineConfig) -> TokenizerParts:
    """Load the parts of the tokenizer, which makes texts lower case first if the folder says so.

    Raises:
        ModelLoadError: the model has no usable tokenizer.
    """
    spec = read_pooling_spec(config.model.model)
    assert spec is not None, "the runner has loaded the folder"
    model = config.model if config.model.tokenizer is not None else replace(config.model, tokenizer=spec.folder)
    tokenizer = read_tokenizer_of(model)
    if spec.do_lower_case:
        _lower(tokenizer.backend_tokenizer)
    return parts_of(tokenizer)


def _lower(backend: Any) -> None:
    own = backend.normalizer
    steps = list(own) if isinstance(own, Normalizers) else [own] if own is not None else []
    if not any(isinstance(step, Lowercase) for step in steps):
        backend.normalizer = Normalizers([Lowercase(), *steps])
