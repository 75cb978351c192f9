"""What turns hidden states into the rows of numbers of a model, in float32: vectors, class scores, or one logit."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from headrace_engine.checkpoints.pooling_folder import PoolingSpec
from headrace_engine.runner.contracts import PoolingInput
from headrace_engine.runner.linear.prepared_linear import LinearKind
from headrace_engine.runner.linear.replacement import pack_linear_layers
from headrace_engine.runner.pooling.vectors import pool

ROW_MODES = ("cls", "lasttoken", "mean")
"""The row of a text that a classification head of transformers reads."""


class Head(Protocol):
    def __call__(self, hidden: torch.Tensor, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        """Return one row for each of the packed texts, [texts, numbers] in float32."""


class ClassifierHead:
    """transformers' own classification head, unmodified.

    Its forward pass runs over one row a text: a stand-in for the base model gives these rows as texts of one token.
    The head moves to float32: in bfloat16 the best scores would be equal.
    """

    def __init__(self, model: PreTrainedModel, linear: LinearKind | None) -> None:
        base = model.base_model
        self.mode = ROW_MODES[0]
        """One of `ROW_MODES`."""
        self._rows = _BaseStandIn(base)
        setattr(model, model.base_model_prefix, self._rows)
        self._model = model.float()
        config = model.config.get_text_config()
        if config.pad_token_id is None:  # decoders look for the last token that is no padding
            config.pad_token_id = 0
        self._token = 0 if config.pad_token_id else 1
        if linear is not None:
            pack_linear_layers(model, linear=linear)

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        self._rows.rows = pool(hidden, inputs, (self.mode,))[:, None]
        ids = torch.full((len(inputs), 1), self._token)
        logits: torch.Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return logits.float()


class _BaseStandIn(nn.Module):
    """Gives fixed rows in place of the base model, and what its pooler makes of them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.rows = torch.empty(0)
        """[texts, 1, hidden size]"""
        self.pooler = getattr(base, "pooler", None)
        self.pooler_activation = getattr(base, "pooler_activation", None)

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.rows, pooler_output=self._pooled())

    def _pooled(self) -> torch.Tensor | None:
        if self.pooler is None:
            return None
        found: torch.Tensor
        if self.pooler_activation is not None:  # ALBERT's pooler is a plain linear layer
            found = self.pooler_activation(self.pooler(self.rows[:, 0]))
        else:
            found = self.pooler(self.rows)
        return found


class LogitScoreHead:
    """The logit of one token at the end of a text, minus that of another. Computes no other logits."""

    def __init__(self, model: PreTrainedModel, spec: PoolingSpec, linear: LinearKind | None) -> None:
        head = model.get_output_embeddings()
        tokens = [token for token in (spec.true_token_id, spec.false_token_id) if token is not None]
        bias = None if head.bias is None else head.bias[tokens].float()
        if linear is not None:
            self._logits: nn.Module = linear(head.weight[tokens].float(), bias)
        else:
            self._logits = nn.Linear(head.in_features, len(tokens), bias=bias is not None)
            self._logits.load_state_dict(
                {"weight": head.weight[tokens].float()} | ({} if bias is None else {"bias": bias})
            )

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        logits = self._logits(pool(hidden, inputs, ("lasttoken",)))
        return logits[:, :1] - logits[:, 1:] if logits.shape[1] == 2 else logits
