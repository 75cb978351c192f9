"""Nothing of a request is logged, whatever happens to it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.errors import EngineDeadError
from headrace_engine.requests.sampling_params import SamplingParams
from vllm_engine.driven_engine import Case, DrivenEngine

SECRET = "xylophone"
FAULT = '''
"""A logits processor of vLLM's that fails as soon as a request comes, and quotes it."""

import os
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

class Failing(LogitsProcessor):
    def __init__(self, *_):
        pass
    def is_argmax_invariant(self):
        return False
    def update_state(self, update):
        self.added = update.added if update is not None else ()
    def apply(self, logits):
        for _, params, prompt, _ in self.added:
            if params.structured_outputs is not None:
                raise RuntimeError(f"request {prompt} of {params}")
        return logits
'''


def test_a_step_that_fails_leaves_nothing_of_its_requests_in_the_log(
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "faulty_processor.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    schema = json.dumps({"type": "object", "properties": {SECRET: {"const": SECRET}}, "required": [SECRET]})
    params = SamplingParams(temperature=0.0, structured_outputs={"json": schema})
    prompt = [40_123, 40_124, 40_125]
    processors = {"enforce_eager": True, "logits_processors": ["faulty_processor:Failing"]}
    with caplog.at_level(logging.DEBUG):
        engine = DrivenEngine(**{**options, "engine_args": processors})
        try:
            with pytest.raises(EngineDeadError, match=SECRET) as failure:
                engine.run([Case(prompt, params, bad_words=[prompt])])
        finally:
            engine.close()
    assert SECRET not in failure.value.summary
    standard = capfd.readouterr()
    logged = caplog.text + standard.out + standard.err
    assert "the engine stops at" in logged
    for part in (SECRET, "40123", "40124", "40_123"):
        assert part not in logged
