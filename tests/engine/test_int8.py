"""int8 products: close to the exact ones, a row's result its own, and a quality loss that is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.gguf_files import write_model
from engine.packed_models import load
from engine.perplexity import perplexity, prompts
from engine.tiny_models import TinyModel
from headrace_engine import LLM, SamplingParams
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.linear import int8_linear
from headrace_engine.runner.linear.grouped_linear import grouped_weights
from headrace_engine.runner.linear.int8_linear import Int8Linear
from headrace_engine.runner.models.paged_model import PagedModel

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/linear",
    "engine/headrace_engine/runner/native",
    "engine/headrace_engine/runner/elementwise",
)

try:
    int8_linear.check_supported()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_rows_are_rounded_to_a_127th_of_their_largest_value(dtype: torch.dtype, rows: int) -> None:
    values = (random(rows, 100) * torch.logspace(-6, 6, rows)[:, None]).to(dtype)
    levels, scales = native_ops.quantise_rows(values)
    most = values.float().abs().amax(dim=1)
    torch.testing.assert_close(scales, most / 127)
    error = (levels.float() - 128) * scales[:, None] - values.float()
    assert (error.abs() <= 0.501 * scales[:, None]).all()


@dtypes
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_close_to_the_exact_ones(dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(96, 40, bias=bias)
    x = (random(2, 7, 96) * 30).to(dtype)
    out = Int8Linear(linear.weight, None if linear.bias is None else linear.bias.to(dtype))(x)
    exact = linear(x.float())
    assert out.shape == (2, 7, 40)
    assert out.dtype is dtype
    assert (out.float() - exact).norm() / exact.norm() < 0.02


def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    linear = Int8Linear(random(64, 128), random(64))
    x = random(33, 128)
    x[7] *= 1e4
    together = linear(x)
    for row in (0, 7, 32):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_spoils_its_own_row_only(value: float) -> None:
    linear, x = Int8Linear(random(32, 64), None), random(3, 64)
    x[1, 5] = value
    assert linear(x).isnan().any(dim=1).tolist() == [False, True, False]


def test_rows_and_weights_of_zeros_give_zeros() -> None:
    assert not Int8Linear(torch.zeros(8, 16), None)(random(2, 16)).any()
    assert not Int8Linear(random(8, 16), None)(torch.zeros(2, 16)).any()


def test_the_decoder_is_rounded_and_the_head_is_not(tiny_model: Callable[[str], TinyModel]) -> None:
    for name in ("llama", "gemma2", "gpt2"):  # fused, of its own kind, and with transposed weights
        config = EngineArgs(model=tiny_model(name).folder, dtype="float32", quantization="int8").create_engine_config()
        paged = PagedModel(config.model, config.cache)
        kinds = [type(module).__name__ for module in paged._model.modules()]
        assert "Linear" not in kinds
        assert kinds.count("Int8Linear") >= 6
        assert type(paged._model.get_output_embeddings()).__name__ in ("PackedLinear", "NativeLinear")


def test_generation_works_with_preemption_and_shared_prefixes(tiny_model: Callable[[str], TinyModel]) -> None:
    """In company a request gets what it gets alone: the products are exact sums, rounded row by row."""
    options: dict[str, Any] = {"dtype": "float32", "quantization": "int8", "batch_invariant": True}
    options |= {"block_size": 16, "max_model_len": 64}
    requests = [[5, 9, 200, 31] * 8 + [i] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    crowded = LLM(tiny_model("llama").folder, num_blocks=14, **options).generate(requests, params, use_tqdm=False)
    alone = LLM(tiny_model("llama").folder, num_blocks=40, max_num_seqs=1, **options)
    for prompt, output in zip(requests, crowded, strict=True):
        assert alone.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4"}, "quantization must be one of None, int8, got 'int4'"),
        ({"quantization": "int8", "device": "static-cpu"}, "quantization is set, which device static-cpu cannot do"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model="m", **options).create_engine_config()


def test_a_gguf_file_is_dequantised_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0")
    assert not grouped_weights(load(path, "bfloat16", quantization="int8"))
    assert "the GGUF file is dequantised: its weights become int8" in caplog.text


def test_a_processor_without_the_instructions_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx2": True})
    with pytest.raises(ConfigError, match="VNNI"):
        int8_linear.check_supported()


def test_the_real_model_loses_little_quality(default_model_in: Callable[[str], Path]) -> None:
    """Perplexity on prompts of the benchmark; the figure on all of them is in benchmarks/results/2026-11-21.md."""
    texts = prompts(6)
    model = str(default_model_in("bfloat16"))
    exact = perplexity(LLM(model, dtype="float32"), texts)
    rounded = perplexity(LLM(model, dtype="float32", quantization="int8"), texts)
    assert rounded != exact
    assert rounded < 1.08 * exact
