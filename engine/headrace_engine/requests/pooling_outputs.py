"""The outputs of `LLM.embed`, `LLM.classify` and `LLM.score`, compatible with vLLM."""

from dataclasses import dataclass


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]
    """One number for each class: probabilities, or logits without the activation."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput:
    """What all outputs have besides their numbers."""

    request_id: str
    prompt_token_ids: list[int]
    """The tokens that were computed, with special tokens."""
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    outputs: EmbeddingOutput


@dataclass(slots=True, kw_only=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    outputs: ClassificationOutput


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput(PoolingRequestOutput):
    outputs: ScoringOutput
