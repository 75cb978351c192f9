"""Runs a transformers model on many texts at once, without padding.

`PackedEncoder` lays all texts in one row. `EqualLengthEncoder` is for models whose attention cannot be replaced: it
computes the texts of one length together.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypedDict, Unpack

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.runner.attention.backend import scale_of
from headrace_engine.runner.attention.varlen import VarlenAttention
from headrace_engine.runner.contracts import PoolingInput

CPU: Final = torch.device("cpu")
# Arguments of the attention function that have no effect on inference.
_IRRELEVANT: Final = {"dropout", "position_ids", "cache_position", "output_attentions", "output_hidden_states"}


class Encoder(Protocol):
    name: str
    """How texts are computed together, for the log."""

    def __call__(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        """Return the last hidden states of all texts, one after the other: [tokens, hidden size] on the CPU."""


class Positions:
    """The position ids that a model gives to a text: successive numbers from `first`.

    RoBERTa's family begins at pad_token_id + 1. The numbers are read from the model: its position embedding is watched
    while it computes one text without position ids.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self.first = 0
        self.rows: int | None = None
        """Number of rows of the position embedding. None: the model has no such table."""
        length = 7
        seen: list[tuple[int, int]] = []

        def watch(module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
            ids = args[0].flatten()
            assert isinstance(module, nn.Embedding)
            if len(ids) == length and torch.equal(ids - ids[0], torch.arange(length)):
                seen.append((int(ids[0]), module.num_embeddings))

        tables = [module for module in base.modules() if isinstance(module, nn.Embedding)]
        hooks = [table.register_forward_hook(watch) for table in tables]
        try:
            own_output(base, PoolingInput(token_ids=[probe_token(base)] * length))
        finally:
            for hook in hooks:
                hook.remove()
        if seen:
            self.first, self.rows = seen[0]

    def max_tokens(self, config: Any) -> int | None:
        """Return how many tokens the model has positions for. None: no limit is known."""
        if self.rows is not None:
            return self.rows - self.first
        limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
        return limit if limit is not None and limit > 0 else None


def probe_token(model: PreTrainedModel) -> int:
    """Return a token from the middle of the vocabulary, which has no special tokens."""
    return int(model.config.get_text_config().vocab_size) // 2


def own_output(model: PreTrainedModel, one: PoolingInput) -> Any:
    """Compute one text as transformers does without our attention."""
    ids = torch.tensor([one.token_ids])
    return model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **options_of(model, token_type_ids=token_types([one])[None], use_cache=False),
    )


def options_of(model: PreTrainedModel, **options: Any) -> dict[str, Any]:
    """Return those options that the model's forward takes by name. Token types are also left out if there is one."""
    taken = inspect.signature(model.forward).parameters
    found = {name: value for name, value in options.items() if name in taken}
    if getattr(model.config, "type_vocab_size", 0) < 2:
        found.pop("token_type_ids", None)
    return found


def token_types(inputs: Sequence[PoolingInput]) -> torch.Tensor:
    """Return the types of all tokens, one text after the other: 1 for those of the second text of a pair, else 0."""
    types = [torch.zeros(len(one.token_ids), dtype=torch.long) for one in inputs]
    for one, own in zip(inputs, types, strict=True):
        if one.second_from:
            own[one.second_from :] = 1
    return torch.cat(types)


class AttentionOptions(TypedDict):
    """What differs from layer to layer."""

    both_ways: bool
    window: int | None
    scale: float
    softcap: float | None


class OwnAttention:
    """The attention function of a transformers model, instead of its own. Subclasses define `compute`."""

    is_compiled = False
    """Whether torch.compile traces it."""

    def __init__(self) -> None:
        self.unknown_options: set[str] = set()
        """Arguments of the attention function that have an effect which it does not have here."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention.

        transformers calls it in every layer: query [texts, heads, tokens, dim] -> [texts, tokens, heads, dim]. Its
        `sliding_window` means: less than this many tokens away, in both directions if the layer is not causal.
        """
        in_use = {name for name, given in others.items() if given is not None and given is not False}
        self.unknown_options |= in_use - _IRRELEVANT
        if attention_mask is not None:
            self.unknown_options.add("attention_mask")
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        output = self.compute(
            query,
            key,
            value,
            both_ways=not causal,
            window=sliding_window,
            scale=scale_of(scaling, query.shape[-1]),
            softcap=softcap,
        )
        return output, None

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Unpack[AttentionOptions],
    ) -> torch.Tensor:
        """Compute one layer. Shapes are those of `attend`, options those of `VarlenAttention.forward`."""
        raise NotImplementedError


class PackedEncoder(OwnAttention):
    """Computes all texts in one row [1, tokens]. `attend` is the model's attention function."""

    name = "packed"

    def __init__(self, attention: VarlenAttention, device: torch.device = CPU) -> None:
        super().__init__()
        self.attention = attention
        self._device = device
        self._base: PreTrainedModel
        self._positions: Positions

    def use(self, base: PreTrainedModel, positions: Positions) -> None:
        """Set the model. It was loaded with `attend` as its attention function."""
        self._base, self._positions = base, positions

    def __call__(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        lengths = [len(one.token_ids) for one in inputs]
        self.attention.begin(lengths)
        first = self._positions.first
        positions = torch.cat([torch.arange(first, first + length) for length in lengths])[None]
        options = options_of(
            self._base,
            position_ids=positions.to(self._device),
            token_type_ids=token_types(inputs)[None].to(self._device),
            use_cache=False,
        )
        ids = torch.tensor([[token for one in inputs for token in one.token_ids]], device=self._device)
        hidden: torch.Tensor = self._base(input_ids=ids, attention_mask=None, **options).last_hidden_state
        return hidden[0].cpu()

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Unpack[AttentionOptions],
    ) -> torch.Tensor:
        output = self.attention.forward(
            query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), **options
        )
        return output[None]


class EqualLengthEncoder:
    """Computes the texts of one length together by the model's own attention. No text is padded, so none is masked."""

    name = "in groups of equal length"

    def __init__(self, base: PreTrainedModel, device: torch.device = CPU) -> None:
        self._base = base
        self._device = device

    def __call__(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        groups: dict[int, list[int]] = {}
        for index, one in enumerate(inputs):
            groups.setdefault(len(one.token_ids), []).append(index)
        found: dict[int, torch.Tensor] = {}
        for length, indices in groups.items():
            same = [inputs[index] for index in indices]
            ids = torch.tensor([one.token_ids for one in same], device=self._device)
            types = token_types(same).view(-1, length).to(self._device)
            options = options_of(self._base, token_type_ids=types, use_cache=False)
            hidden = self._base(input_ids=ids, attention_mask=torch.ones_like(ids), **options).last_hidden_state
            found.update(zip(indices, hidden.cpu(), strict=True))
        return torch.cat([found[index] for index in range(len(inputs))])
