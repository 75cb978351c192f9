"""`ShortForward`: a forward pass without the model's own code around its decoder layers.

That code creates unused masks, calls hooks, wraps outputs, and computes a norm with a dozen small operators. It takes
0.8 ms in each step, while all layers of a small model take 6 ms for one request. A check at load verifies that the
short forward pass computes the same.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.elementwise.ops import Norm
from headrace_engine.runner.fused.decoder_stack import DecoderStack
from headrace_engine.runner.fused.fusion import differs, probe_tokens
from headrace_engine.runner.linear.prepared_linear import PreparedLinear

logger = logging.getLogger(__name__)


class ShortForward:
    """Embeddings, stacked layers, and the output head, which includes the last norm."""

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
        """Return the short forward pass of a model, or None if the model computes something else.

        Args:
            model: with `logits_to_keep`, and with its final linear layers.
            stack: replaces all layers of the model.
        """
        decoder: Any = model.get_decoder()
        norm, head = Norm.of(getattr(decoder, "norm", None)), model.get_output_embeddings()
        if norm is None or not isinstance(head, PreparedLinear):
            return None
        rotary = None if stack.makes_tables else getattr(decoder, "rotary_emb", None)
        parts = (model.get_input_embeddings(), rotary)
        stand_in = _StandIn(takes_tables=not stack.makes_tables)
        try:
            if _computes_the_same(cls(*parts, stand_in, norm, head), stand_in, model, max_model_len):
                return cls(*parts, stack, norm, head)
        except Exception as error:  # noqa: BLE001  # any failure: the forward pass of the model works
            logger.debug("the model's own forward pass is kept: %s", error)
        return None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits at `inputs.logits_indices`, [indices, vocabulary]."""
        return self._compute(inputs.input_ids, inputs.positions, inputs.logits_indices)

    def _compute(self, token_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        hidden = self._embeddings(token_ids[None])
        position_embeddings = None if self._rotary is None else self._rotary(hidden, positions[None])
        hidden = self._stack(hidden, position_embeddings=position_embeddings)
        return self._head.after_norm(hidden[0][logits_indices], None, self._norm)


class _StandIn(nn.Module):
    """Replaces all layers: records its inputs, and returns fixed numbers."""

    def __init__(self, *, takes_tables: bool) -> None:
        super().__init__()
        self._takes_tables = takes_tables
        self.given: list[torch.Tensor] = []

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **__: Any,
    ) -> torch.Tensor:
        tables = position_embeddings if self._takes_tables else None
        self.given = [hidden_states.clone(), *(tables or ())]
        numbers = torch.arange(hidden_states.numel(), dtype=torch.float32).view_as(hidden_states)
        return torch.sin(numbers * numbers).to(hidden_states.dtype)


@torch.inference_mode()
def _computes_the_same(short: ShortForward, stand_in: _StandIn, model: PreTrainedModel, max_model_len: int) -> bool:
    """Whether `short` gives the layers and the head the inputs that the model's own code gives them, and the model
    returns the output of its head unchanged.

    To find out, the output of the head is replaced by numbers so large that any cap or scale would change them.
    """
    token_ids, positions = probe_tokens(model, max_model_len)
    kept = torch.arange(0, len(token_ids), 3)
    logits = short._compute(token_ids, positions, kept)
    given = stand_in.given
    large = torch.where(torch.arange(logits.shape[-1]) % 2 == 0, 100.0, -100.0).to(logits.dtype).expand_as(logits)
    own_logits: list[torch.Tensor] = []

    def replace(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        own_logits.append(output[0])
        return large[None].clone()

    decoder: Any = model.get_decoder()
    layers, hook = decoder.layers, short._head.register_forward_hook(replace)
    try:
        decoder.layers = nn.ModuleList([stand_in])
        found = model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept
        ).logits[0]
    finally:
        decoder.layers = layers
        hook.remove()
    same_inputs = len(given) == len(stand_in.given) and all(map(torch.equal, given, stand_in.given))
    [own] = own_logits
    same_head = own.shape == logits.shape and not differs(own, logits, model.dtype)
    return same_inputs and same_head and torch.equal(found.to(large.dtype), large)
