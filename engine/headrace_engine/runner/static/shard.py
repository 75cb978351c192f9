"""`ModelShard`: the weights of one rank. With a single rank it is the whole model."""

from contextlib import nullcontext
from typing import Any

import torch

from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.models import loading
from headrace_engine.runner.models.load_errors import permanent_errors
from headrace_engine.runner.static.compiler_backend import CompilerBackend, Step
from headrace_engine.runner.static.group import Group
from headrace_engine.runner.static.shapes import StaticInputs
from headrace_engine.runner.static.weights import load_decoder


class ModelShard:
    """Loads its weights when it is created.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: an option does not fit the model.
    """

    def __init__(self, config: EngineConfig, compiler_backend: CompilerBackend, group: Group | None) -> None:
        self._block_size = config.cache.block_size
        self._compiler_backend = compiler_backend
        self._step: Step
        self.hf_config = loading.load_config(config.model)
        self.dtype = loading.resolve_dtype(config.model, self.hf_config)
        self.max_model_len = loading.resolve_max_model_len(config.model, self.hf_config)
        with permanent_errors(config.model.model, "loaded"):
            self.decoder = load_decoder(
                config.model,
                self.hf_config,
                dtype=self.dtype,
                max_positions=self.max_model_len,
                device=compiler_backend.device,
                rank=group.rank if group else 0,
                num_ranks=group.size if group else 1,
                reduce=group.reduce if group else None,
            )
        self.num_parameters = sum(parameter.numel() for parameter in self.decoder.parameters())
        """Number of parameters on this rank."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K/V memory of a block on this rank."""
        attention: Any = self.decoder.model.layers[0].self_attn
        keys = attention.k_proj.weight
        return int(2 * len(self.decoder.model.layers) * self._block_size * keys.shape[0] * keys.element_size())

    def allocate(self, num_blocks: int) -> None:
        self.decoder.allocate(num_blocks, self._block_size, self._compiler_backend.device)

    def compile(self, num_shapes: int) -> None:
        self._step = self._compiler_backend.compile(self.decoder, num_shapes)

    def run(self, inputs: StaticInputs, *, sealed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step. Raises RecompilationError if its shape was not compiled during warm-up."""
        device = self._compiler_backend.device
        arguments = (inputs.tokens.to(device), inputs.rows.to(device), inputs.sampling_values.to(device))
        with self._compiler_backend.sealed() if sealed else nullcontext():
            return self._step(*arguments)
