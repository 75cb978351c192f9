"""`create_tokenizer`: creates the tokenizer of a model from its parts, or from its files if these do not suffice."""

from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts


def create_tokenizer(
    model: str, parts: TokenizerParts, *, trust_remote_code: bool = False, revision: str | None = None
) -> ModelTokenizer:
    """Create the tokenizer from its parts. If they do not suffice, read it from the model, which imports torch."""
    if not parts.has_own_methods:
        return ModelTokenizer(parts)
    from headrace_engine.text.tokenizer_loader import OwnMethodsTokenizer, read_tokenizer  # imports torch

    whole = read_tokenizer(model, trust_remote_code=trust_remote_code, revision=revision)
    return OwnMethodsTokenizer(parts, whole)
