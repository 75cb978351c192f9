"""`ShortForward`: a model's forward pass without the model's own code around its decoder layers.

Between embeddings and logits that code makes masks nobody reads, hooks, outputs, and a norm of a dozen small operators:
0.8 ms a step, where all layers of a small model take 6 for one request. Whether the short way computes the same is not
assumed but seen at load.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.fused.decoder_stack import DecoderStack
from headrace_engine.runner.fused.fusion import differs, probe_tokens
from headrace_engine.runner.fused.norm import Norm
from headrace_engine.runner.packed_linear import PreparedLinear

logger = logging.getLogger(__name__)


class ShortForward:
    """Embeddings, stacked layers, and the output head with the last norm in its pass over the input."""

    def __init__(
        self, embeddings: nn.Module, rotary: nn.Module | None, stack: nn.Module, norm: Norm, head: PreparedLinear
    ) -> None:
        self._embeddings = embeddings
        self._rotary = rotary
        self._stack = stack
        self._norm = norm
        self._head = head

    @classmethod
    def of(cls, model: PreTrainedModel, stack: DecoderStack, max_model_len: int) -> "ShortForward | None":
        """Of a model whose layers `stack` stands for; None where the model computes something else.

        Args:
            model: with `logits_to_keep`, and all its linear layers as they stay.
        """
        decoder: Any = model.get_decoder()
        norm, head = Norm.of(getattr(decoder, "norm", None)), model.get_output_embeddings()
        if norm is None or not isinstance(head, PreparedLinear):
            return None
        rotary = getattr(decoder, "rotary_emb", None)
        parts = (model.get_input_embeddings(), rotary)
        try:
            if _computes_the_same(cls(*parts, _StandIn(), norm, head), model, max_model_len):
                return cls(*parts, stack, norm, head)
        except (RuntimeError, TypeError, ValueError) as error:  # its parts do not fit together in this way
            logger.debug("the model's own forward pass is kept: %s", error)
        return None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """The logits at `inputs.logits_indices`, [indices, vocabulary]."""
        return self._compute(inputs.input_ids, inputs.positions, inputs.logits_indices)

    def _compute(self, token_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        hidden = self._embeddings(token_ids[None])
        position_embeddings = None if self._rotary is None else self._rotary(hidden, positions[None])
        hidden = self._stack(hidden, position_embeddings=position_embeddings)
        return self._head.after_norm(hidden[0][logits_indices], None, self._norm)


class _StandIn(nn.Module):
    """In the place of all layers: notes what they are given, and answers with numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **__: Any,
    ) -> torch.Tensor:
        self.given = [hidden_states.clone(), *(position_embeddings or ())]
        numbers = torch.arange(hidden_states.numel(), dtype=torch.float32).view_as(hidden_states)
        return torch.sin(numbers * numbers).to(hidden_states.dtype)


@torch.inference_mode()
def _computes_the_same(short: ShortForward, model: PreTrainedModel, max_model_len: int) -> bool:
    token_ids, positions = probe_tokens(model, max_model_len)
    kept = torch.arange(0, len(token_ids), 3)
    decoder: Any = model.get_decoder()
    layers, stand_in = decoder.layers, short._stack
    assert isinstance(stand_in, _StandIn)
    logits = short._compute(token_ids, positions, kept)
    given = stand_in.given
    try:
        decoder.layers = nn.ModuleList([stand_in])
        expected = model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept
        ).logits[0]
    finally:
        decoder.layers = layers
    same_inputs = len(given) == len(stand_in.given) and all(map(torch.equal, given, stand_in.given))
    return same_inputs and logits.shape == expected.shape and not differs(logits, expected, model.dtype)
