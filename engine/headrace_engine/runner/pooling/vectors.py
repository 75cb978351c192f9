"""`ModuleChain`: the modules of sentence-transformers after the transformer, in float32, each text by itself."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from safetensors.torch import load_file
from torch import nn

from headrace_engine.checkpoints.pooling_modules import Dense, LayerNorm, Normalize, Pooling, PoolingModule
from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.contracts import PoolingInput
from headrace_engine.runner.linear.prepared_linear import LinearKind

Step = Callable[[torch.Tensor], torch.Tensor]


def pool(hidden: torch.Tensor, inputs: Sequence[PoolingInput], modes: Sequence[str]) -> torch.Tensor:
    """Pool the hidden states [tokens, size] of packed texts. Return [texts, number of modes * size] in float32.

    Texts are summed one by one: the result of one does not depend on the others.
    """
    ends = torch.tensor([0, *(len(one.token_ids) for one in inputs)]).cumsum(0).tolist()
    rows = []
    for one, (first, end) in zip(inputs, pairwise(ends), strict=True):
        tokens = hidden[first + one.pooled_from : end].float()
        rows.append(torch.cat([_pooled(tokens, mode, one.pooled_from) for mode in modes]))
    return torch.stack(rows)


def _pooled(tokens: torch.Tensor, mode: str, pooled_from: int) -> torch.Tensor:
    match mode:
        case "cls":
            return tokens[0]
        case "lasttoken":
            return tokens[-1]
        case "max":
            return tokens.amax(0)
        case "mean":
            return tokens.sum(0) / len(tokens)
        case "mean_sqrt_len_tokens":
            return tokens.sum(0) / len(tokens) ** 0.5
    assert mode == "weightedmean", mode
    weights = torch.arange(pooled_from + 1, pooled_from + 1 + len(tokens), dtype=torch.float32)
    return (tokens * weights[:, None]).sum(0) / weights.sum()


class ModuleChain:
    """All modules but a Normalize at the end, which the caller applies after it has cut the vector.

    Raises:
        ModelLoadError: the weights of a module do not fit its configuration.
    """

    def __init__(self, model: str, modules: Sequence[PoolingModule], size: int, linear: LinearKind | None) -> None:
        pooling, *rest = modules
        assert isinstance(pooling, Pooling), pooling
        self._modes = pooling.modes
        self.dimensions = size * len(pooling.modes)
        """Numbers of a vector."""
        self.normalizes = bool(rest) and isinstance(rest[-1], Normalize)
        """Whether the vector is divided by its norm at the end."""
        self._steps: list[Step] = []
        for module in rest[:-1] if self.normalizes else rest:
            step, self.dimensions = _step(model, module, self.dimensions, linear)
            self._steps.append(step)

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        """Return the vectors of packed texts, [texts, dimensions] in float32."""
        rows = pool(hidden, inputs, self._modes)
        for step in self._steps:
            rows = step(rows)
        return rows


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """Divide each row by its norm."""
    return nn.functional.normalize(rows, dim=-1)


def activation_of(name: str) -> Step:
    """Return the activation of this class of torch.nn. It is applied to each row by itself.

    torch computes the last numbers of a tensor by other instructions than the others. So the result of a row would
    depend on the number of rows.
    """
    activation = getattr(nn, name, None)
    if not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise ModelLoadError(f"torch.nn has no activation {name}")
    try:
        found: Step = activation()
    except TypeError as error:
        raise ModelLoadError(f"torch.nn.{name} is no activation without arguments") from error
    return lambda rows: torch.stack([found(row) for row in rows])


def _step(model: str, module: PoolingModule, size: int, linear: LinearKind | None) -> tuple[Step, int]:
    """Return a module as a function of rows, and the number of its outputs."""
    match module:
        case Normalize():
            return normalized, size
        case LayerNorm():
            norm = nn.LayerNorm(module.dimension)
            _fill(model, module.weights, {"norm": norm}, module.dimension, size)
            return norm.eval(), size
        case Dense():
            return _dense(model, module, size, linear), module.out_features
    raise AssertionError(module)


def _dense(model: str, module: Dense, size: int, linear: LinearKind | None) -> Step:
    layers = {"linear": nn.Linear(module.in_features, module.out_features, bias=module.bias)}
    if module.use_residual and module.in_features != module.out_features:
        layers["residual"] = nn.Linear(module.in_features, module.out_features, bias=False)
    _fill(model, module.weights, layers, module.in_features, size)
    if linear is not None:
        packed = {name: linear(layer.weight, layer.bias) for name, layer in layers.items()}
        project, residual = packed["linear"], packed.get("residual")
    else:
        project, residual = layers["linear"], layers.get("residual")  # type: ignore[assignment]
    activation = activation_of(module.activation)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        out = activation(project(rows))
        if module.use_residual:
            out = out + (rows if residual is None else residual(rows))
        return out

    return compute


def _fill(model: str, path: object, layers: Mapping[str, nn.Module], takes: int, given: int) -> None:
    """Read the weights of layers in float32."""
    if takes != given:
        raise ModelLoadError(f"model {model!r}: {path} takes {takes} numbers, the module before it gives {given}")
    found = nn.ModuleDict(layers)
    try:
        found.load_state_dict({name: tensor.float() for name, tensor in load_file(str(path)).items()})
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(f"model {model!r}: {path} does not fit its config.json: {error}") from error
