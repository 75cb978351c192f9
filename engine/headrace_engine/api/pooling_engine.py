"""`PoolingEngine`: embeds, classifies and scores texts, in the thread of the caller."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_engine.checkpoints.pooling_folder import read_pooling_spec
from headrace_engine.core.pooling_core import PoolingCore
from headrace_engine.core.runner_factory import create_pooling_runner
from headrace_engine.errors import ConfigError, HeadraceEngineError, InvalidRequestError
from headrace_engine.options.config import OWN_ENGINE, EngineConfig
from headrace_engine.requests.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from headrace_engine.requests.pooling_params import PoolingParams
from headrace_engine.requests.pooling_request import PoolingCoreRequest, PoolingTask
from headrace_engine.text.pooling_input import PoolingTokenizer, TokenizedInputs
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts

Progress = Callable[[int], Any]
"""Called with the number of inputs that a step has finished."""


class PoolingEngine:
    """A model that computes one row of numbers for each text.

    Raises:
        ModelLoadError, ConfigError: the model cannot be served with these options.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._name = config.model.model
        self._core = PoolingCore(config, create_pooling_runner(config))
        self.model_info = self._core.model_info
        assert self.model_info.pooling is not None
        self.info = self.model_info.pooling
        tokenizer = ModelTokenizer(TokenizerParts(**self._core.call("tokenizer").result()))
        self._tokenizer = PoolingTokenizer(tokenizer, self.info, self.model_info.vocab_size)
        self._next_id = 0

    def embed(self, inputs: Sequence[Any], params: PoolingParams, progress: Progress) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each text or list of token ids.

        Raises:
            InvalidRequestError: an input or parameter is invalid, or the model does not embed. Nothing was computed.
            HeadraceEngineError: a row is not finite. Names the index of its input.
        """
        self._check_task("embed")
        tokenized = self._tokenizer.tokenize("embed", inputs, params)
        rows = self._compute("embed", tokenized, params, progress)
        return [
            EmbeddingRequestOutput(request_id=name, prompt_token_ids=ids, outputs=EmbeddingOutput(row))
            for name, ids, row in zip(self._names(len(rows)), tokenized.inputs, rows, strict=True)
        ]

    def classify(
        self, inputs: Sequence[Any], params: PoolingParams, progress: Progress
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each class for each text, pair of texts or list of token ids.

        Raises the errors of `embed`.
        """
        self._check_task("classify")
        tokenized = self._tokenizer.tokenize("classify", inputs, params)
        rows = self._compute("classify", tokenized, params, progress)
        return [
            ClassificationRequestOutput(request_id=name, prompt_token_ids=ids, outputs=ClassificationOutput(row))
            for name, ids, row in zip(self._names(len(rows)), tokenized.inputs, rows, strict=True)
        ]

    def score(
        self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams, progress: Progress
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair: one query for all documents, or one for each.

        A model that embeds gives the cosine of the two embeddings. Raises the errors of `embed`.
        """
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"queries has {len(queries)} entries, documents {len(documents)}: both must have the same number, or "
                "queries one"
            )
        if "embed" in self.info.tasks:
            return self._cosines(queries, documents, params, progress)
        self._check_task("score")
        pairs = [(queries[index if len(queries) > 1 else 0], document) for index, document in enumerate(documents)]
        tokenized = self._tokenizer.tokenize("score", pairs, params)
        rows = self._compute("score", tokenized, params, progress)
        return [
            ScoringRequestOutput(request_id=name, prompt_token_ids=ids, outputs=ScoringOutput(row[0]))
            for name, ids, row in zip(self._names(len(rows)), tokenized.inputs, rows, strict=True)
        ]

    def _cosines(
        self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams, progress: Progress
    ) -> list[ScoringRequestOutput]:
        tokenized = self._tokenizer.tokenize("embed", [*queries, *documents], params)
        vectors = self._compute("embed", tokenized, params, progress, normalize=True)
        found = []
        for index, name in enumerate(self._names(len(documents))):
            query, document = index if len(queries) > 1 else 0, len(queries) + index
            cosine = sum(a * b for a, b in zip(vectors[query], vectors[document], strict=True))
            ids = tokenized.inputs[query] + tokenized.inputs[document]
            found.append(ScoringRequestOutput(request_id=name, prompt_token_ids=ids, outputs=ScoringOutput(cosine)))
        return found

    def _names(self, count: int) -> list[str]:
        first, self._next_id = self._next_id, self._next_id + count
        return [str(number) for number in range(first, self._next_id)]

    def _check_task(self, task: PoolingTask) -> None:
        if task not in self.info.tasks:
            raise InvalidRequestError(
                f"model {self._name!r} computes {' and '.join(self.info.tasks)} of texts; it does not {task}"
            )

    def _compute(
        self,
        task: PoolingTask,
        tokenized: TokenizedInputs,
        params: PoolingParams,
        progress: Progress,
        *,
        normalize: bool | None = None,
    ) -> list[list[float]]:
        """Compute all inputs, and return one row of numbers for each."""
        request = PoolingCoreRequest(
            request_id=task,
            task=task,
            inputs=tokenized.inputs,
            second_from=tokenized.second_from,
            num_prompt_tokens=tokenized.num_prompt_tokens,
            dimensions=params.dimensions,
            normalize=params.use_activation if normalize is None else normalize,
            activation=params.use_activation is not False,
        )
        self._core.add_request(request)
        rows: list[list[float]] = []
        try:
            while self._core.has_work():
                for found in self._core.step().rows:
                    if found.error is not None:
                        raise HeadraceEngineError(found.error)
                    numbers = array("f", found.data)
                    width = len(numbers) // found.count
                    rows += [numbers[start : start + width].tolist() for start in range(0, len(numbers), width)]
                    progress(found.count)
        finally:
            self._core.abort_requests([request.request_id])
        return rows

    def close(self) -> None:
        self._core.shutdown()


def open_pooling_engine(config: EngineConfig) -> PoolingEngine | None:
    """Load the model of a folder that embeds or scores. Return None if it generates, or has another engine.

    Raises:
        ModelLoadError, ConfigError: the model cannot be served with these options.
    """
    if config.engine != OWN_ENGINE or read_pooling_spec(config.model.model) is None:
        return None
    if config.engine_python is not None:
        raise ConfigError("engine_python is set, but a model that embeds or scores runs in the process of the caller")
    return PoolingEngine(config)


def pooling_input(prompt: Any) -> Any:
    """Return the text, pair or token ids of a prompt, which may be a map as for `LLM.generate`."""
    if not isinstance(prompt, Mapping):
        return prompt
    given = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(given) != 1 or set(prompt) - {"prompt", "prompt_token_ids"}:
        raise InvalidRequestError("a prompt must be text, a list of token ids, or a map with one of them")
    return given[0]
