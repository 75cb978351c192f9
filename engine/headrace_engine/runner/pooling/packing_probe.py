"""Compares what a pooling model computes for several texts at once with what transformers computes for each alone.

The code knows no names of architectures. A model that packing would change is not packed. A model whose head does not
give transformers' scores is refused.
"""

from typing import Any, Final

import torch
from transformers import PreTrainedModel

from headrace_engine.checkpoints.pooling_folder import PoolingSpec
from headrace_engine.runner.contracts import PoolingInput
from headrace_engine.runner.pooling.encoders import Encoder, PackedEncoder, own_output, probe_token
from headrace_engine.runner.pooling.heads import ROW_MODES, ClassifierHead, Head

_LENGTHS: Final = (1, 9, 4, 80)
"""The last one is longer than most sliding windows."""
_POISONED: Final = 1
"""The embeddings of this text are NaN in the second run."""
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Share of the largest number of the reference."""


class PackingProbe:
    """A few short texts, and what transformers computes for them.

    Args:
        model: as loaded, with transformers' own attention.
        max_tokens: the longest text that it takes.
    """

    def __init__(self, model: PreTrainedModel, spec: PoolingSpec, max_tokens: int) -> None:
        self.inputs = _texts(model, max_tokens)
        self._gives_hidden = bool(spec.modules)
        self._expected = torch.cat([_reference(own_output(model, one), spec) for one in self.inputs]).float()
        self._tolerance = _TOLERANCE[model.dtype] * float(self._expected.abs().max())

    def difference(self, encoder: Encoder, head: Head) -> str | None:
        """Return a sentence if an encoder and a head compute other numbers than transformers, else None.

        Sets the mode of a classification head: the first one that gives transformers' scores.
        """
        hidden = encoder(self.inputs)
        if self._gives_hidden:
            return self._compare(hidden.float())
        if not isinstance(head, ClassifierHead):
            return self._compare(head(hidden, self.inputs))
        for mode in (head.mode, *ROW_MODES):
            head.mode = mode
            problem = self._compare(head(hidden, self.inputs))
            if problem is None:
                break
        return problem

    def _compare(self, found: torch.Tensor) -> str | None:
        worst = float((found - self._expected).abs().max())
        if worst <= self._tolerance:  # false for NaN
            return None
        return f"its results differ by {worst:.1g} from transformers', more than {self._tolerance:.1g}"

    def reason_not_to_pack(self, encoder: PackedEncoder, head: Head, base: PreTrainedModel) -> str | None:
        """Return why the packed encoder would compute this model wrongly, None if it does not."""
        encoder.unknown_options.clear()
        problem = self.difference(encoder, head)
        if encoder.unknown_options:
            return f"its attention takes {', '.join(sorted(encoder.unknown_options))}"
        return problem or self._leak(encoder, base)

    def is_batch_invariant(self, encoder: Encoder, head: Head) -> bool:
        """Whether each text has the same bytes alone and among the others."""
        together = head(encoder(self.inputs), self.inputs)
        alone = [head(encoder([one]), [one]) for one in self.inputs]
        return torch.equal(together, torch.cat(alone))

    def _leak(self, encoder: PackedEncoder, base: PreTrainedModel) -> str | None:
        """Compute the texts with NaN for one of them. Return a sentence if another one is changed."""
        lengths = [len(one.token_ids) for one in self.inputs]
        first = sum(lengths[:_POISONED])

        def poison(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, first : first + lengths[_POISONED]] = torch.nan
            return output

        hook = base.get_input_embeddings().register_forward_hook(poison)
        try:
            parts = torch.split(encoder(self.inputs), lengths)
        finally:
            hook.remove()
        if all(bool(part.isfinite().all()) for index, part in enumerate(parts) if index != _POISONED):
            return None
        return "one text has an effect on another outside of attention"


def _texts(model: PreTrainedModel, max_tokens: int) -> list[PoolingInput]:
    first = probe_token(model)
    many = max(1, model.config.get_text_config().vocab_size // 4)
    texts = [
        PoolingInput(token_ids=[first + index * 7 % many for index in range(min(length, max_tokens))])
        for length in _LENGTHS
    ]
    for one in texts[1:]:
        one.second_from = len(one.token_ids) // 2
    return texts


def _reference(output: Any, spec: PoolingSpec) -> torch.Tensor:
    """Return what transformers computes for one text: hidden states, class scores, or the score of LogitScore."""
    if spec.modules:
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
    if spec.head == "classifier":
        scores: torch.Tensor = output.logits
        return scores
    last = output.logits[0, -1]
    score: torch.Tensor = last[spec.true_token_id]
    return (score if spec.false_token_id is None else score - last[spec.false_token_id]).view(1, 1)
