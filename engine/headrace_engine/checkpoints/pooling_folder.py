"""`PoolingSpec`: what the folder of a model that embeds or scores texts says, as sentence-transformers 6 reads it.

Reads JSON files only. Refuses what is not served, with what to do instead. Imports no torch.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from headrace_engine.checkpoints.pooling_modules import Dense, Pooling, PoolingModule, check_activation, read_module
from headrace_engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

Head = Literal["none", "classifier", "logit_score"]

_TRANSFORMER_CONFIGS: Final = (
    "sentence_bert_config.json",
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")),
)
_NO_LIMIT: Final = 1_000_000
"""transformers writes a huge number for a tokenizer without a limit."""
_OTHER_KINDS: Final = {
    "SparseEncoder": "computes sparse vectors",
    "MultiVectorEncoder": "computes a vector for each token",
}
_CLASSIFIER: Final = "ForSequenceClassification"
_ENCODER_ENDINGS: Final = ("Model", "ForMaskedLM", "ForPreTraining")
_GENERATING_ENDINGS: Final = ("LMHeadModel", "DoubleHeadsModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """The steps from text to vector or scores."""

    folder: str
    """The folder of the transformers model."""
    head: Head
    """none: the modules end in an embedding. classifier: the model's own head, or a Dense module that gives scores.
    logit_score: the difference of two tokens' logits."""
    modules: tuple[PoolingModule, ...] = ()
    """Applied to the hidden states, in order. Empty for a classification head of transformers and for logit_score."""
    max_seq_length: int | None = None
    """The limit in tokens of sentence-transformers' file, or else the tokenizer's. None: the model's limit applies."""
    do_lower_case: bool = False
    prompts: Mapping[str, str]
    default_prompt_name: str | None = None
    matryoshka_dimensions: tuple[int, ...] = ()
    """The dimensions that the model was trained for, if it lists them."""
    is_matryoshka: bool = False
    activation: str | None = None
    """Class of torch that turns logits into scores. None: a sigmoid for one label, nothing for several."""
    true_token_id: int | None = None
    false_token_id: int | None = None

    @property
    def pools_prompt(self) -> bool:
        """Whether the tokens of a prompt are pooled."""
        return all(module.include_prompt for module in self.modules if isinstance(module, Pooling))


def read_pooling_spec(model: str) -> PoolingSpec | None:
    """Read the folder of a model. Return None if it is no local folder, or if its model generates text.

    Raises:
        ModelLoadError: the folder describes something that is not served.
    """
    folder = Path(model)
    if not (folder / "modules.json").is_file() and not (folder / "config.json").is_file():
        return None
    try:
        if (folder / "modules.json").is_file():
            return _Folder(model, folder).read()
        config = _json(folder / "config.json")
        return _spec_without_modules(model, config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"model {model!r} cannot be read: {type(error).__name__}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} must hold a map")
    return found


def _spec_without_modules(model: str, config: dict[str, Any]) -> PoolingSpec | None:
    names = config.get("architectures") or [""]
    name = str(names[0])
    if name.endswith(_CLASSIFIER):
        return PoolingSpec(
            folder=model,
            head="classifier",
            max_seq_length=_tokenizer_limit(Path(model)),
            prompts={},
            activation=_activation(model, config),
        )
    if not name.endswith(_ENCODER_ENDINGS) or name.endswith(_GENERATING_ENDINGS):
        return None
    logger.warning("%s has no modules.json: its embeddings are the mean over all tokens, not normalised", model)
    return PoolingSpec(
        folder=model,
        head="none",
        modules=(Pooling(modes=("mean",), include_prompt=True),),
        max_seq_length=_tokenizer_limit(Path(model)),
        prompts={},
        **_dims(config),
    )


def _tokenizer_limit(folder: Path) -> int | None:
    limit = _json(folder / "tokenizer_config.json").get("model_max_length")
    return int(limit) if limit is not None and 0 < limit < _NO_LIMIT else None


def _dims(config: dict[str, Any]) -> dict[str, Any]:
    dimensions = tuple(sorted(config.get("matryoshka_dimensions") or ()))
    return {
        "matryoshka_dimensions": dimensions,
        "is_matryoshka": bool(dimensions) or bool(config.get("is_matryoshka", False)),
    }


def _activation(model: str, config: dict[str, Any]) -> str | None:
    old = (config.get("sentence_transformers") or {}).get("activation_fn")
    name = config.get("activation_fn") or old or config.get("sbert_ce_default_activation_function")
    return None if name is None else check_activation(model, "its configuration", name)


class _Folder:
    """A folder with modules.json."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._about = _json(folder / "config_sentence_transformers.json")
        self._modules = json.loads((folder / "modules.json").read_bytes())

    def read(self) -> PoolingSpec:
        kind = self._about.get("model_type", "SentenceTransformer")
        if kind in _OTHER_KINDS:
            raise self._refusal(f"is a {kind}, which {_OTHER_KINDS[kind]}; served are models with one vector a text")
        first, *rest = self._modules
        if self._class_of(first) != "Transformer":
            raise self._refusal(
                f"begins with the module {self._class_of(first)}; served are models that begin with Transformer"
            )
        transformer = self._folder / first["path"]
        own = next((_json(transformer / name) for name in _TRANSFORMER_CONFIGS if (transformer / name).is_file()), {})
        config = _json(transformer / "config.json")
        task = own.get("transformer_task", "feature-extraction")
        shared: dict[str, Any] = {
            "folder": str(transformer),
            "max_seq_length": own.get("max_seq_length") or _tokenizer_limit(transformer),
            "do_lower_case": bool(own.get("do_lower_case", False)),
            "prompts": {name: text for name, text in (self._about.get("prompts") or {}).items() if text is not None},
            "default_prompt_name": self._about.get("default_prompt_name"),
            "activation": _activation(self._model, config | self._about),
        }
        if task == "sequence-classification":
            self._check_is_last(rest)
            return PoolingSpec(head="classifier", **shared)
        if task == "text-generation":
            return self._logit_score(rest, shared)
        if task != "feature-extraction":
            raise self._refusal(f"has the transformer_task {task}, which is not served")
        return self._chain(rest, shared, config)

    def _chain(self, entries: list[Any], shared: dict[str, Any], config: dict[str, Any]) -> PoolingSpec:
        modules = [
            module
            for entry in entries
            if (module := read_module(self._model, self._class_of(entry), self._folder / entry["path"])) is not None
        ]
        if not modules or not isinstance(modules[0], Pooling):
            raise self._refusal("has no Pooling module after the Transformer: it computes a vector for each token")
        if any(isinstance(module, Pooling) for module in modules[1:]):
            raise self._refusal("has more than one Pooling module")
        scores = isinstance(modules[-1], Dense) and modules[-1].gives_scores
        if self._about.get("model_type") == "CrossEncoder" and not scores:
            raise self._refusal("is a CrossEncoder whose last module gives no scores")
        return PoolingSpec(head="classifier" if scores else "none", modules=tuple(modules), **shared, **_dims(config))

    def _logit_score(self, entries: list[Any], shared: dict[str, Any]) -> PoolingSpec:
        if [self._class_of(entry) for entry in entries] != ["LogitScore"]:
            raise self._refusal("generates text, and LogitScore is not its only module after the Transformer")
        score = _json(self._folder / entries[0]["path"] / "config.json")
        return PoolingSpec(
            head="logit_score",
            true_token_id=score["true_token_id"],
            false_token_id=score.get("false_token_id"),
            **shared,
        )

    def _check_is_last(self, entries: list[Any]) -> None:
        if entries:
            raise self._refusal(f"has the module {self._class_of(entries[0])} after its classification head")

    @staticmethod
    def _class_of(entry: Mapping[str, Any]) -> str:
        return str(entry["type"]).rpartition(".")[2]

    def _refusal(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"model {self._model!r} {reason}")
