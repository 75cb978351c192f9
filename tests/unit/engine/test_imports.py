"""The core stays free of what takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

OURS = ("llguidance", "headrace_engine.core.engine_core", "headrace_engine.grammar.grammar")
HEAVY = ("torch", "transformers", "tokenizers", "numpy", "celery", "redis", "prometheus_client")


@pytest.mark.parametrize(
    "module",
    [
        "headrace_engine",
        "headrace_engine.options.config",
        "headrace_engine.options.engine_args",
        "headrace_engine.core.process",
        "headrace_engine.core.core_client",
        "headrace_engine.runner.contracts",
        "headrace_engine.requests.sampling_params",
    ],
)
def test_importing_the_core_imports_no_tensor_library_and_no_queue(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["headrace_engine.core.serving", "headrace_engine.core.child"])
def test_serving_any_core_imports_nothing_of_our_own_engine(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()).isdisjoint((*OURS, *HEAVY))


def test_the_public_names_are_found_without_importing_the_rest() -> None:
    program = (
        "import sys, headrace_engine as e; e.SamplingParams, e.LLM, e.AsyncLLMEngine; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    import headrace_engine

    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        headrace_engine.LMM  # noqa: B018
