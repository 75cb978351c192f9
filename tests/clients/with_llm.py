"""llm, the command line tool, with extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import COLOUR_SCHEMA, Site, check, is_colour, main, same

_FUNCTION = '''
def paint(colour: str) -> str:
    """Paint the wall."""
    return "it is " + colour
'''


def llm(site: Site, *arguments: str, model: str = "chat") -> str:
    with tempfile.TemporaryDirectory() as folder:
        models = [
            {"model_id": "chat", "supports_schema": True, "supports_tools": True},
            {"model_id": "text", "completion": True},
        ]
        served = {"model_name": site.model, "api_base": site.url, "api_key_name": "none"}
        # JSON is YAML
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([{**each, **served} for each in models]))
        (Path(folder) / "keys.json").write_text('{"none": "none"}')
        command = [Path(sys.executable).with_name("llm"), "--model", model, *arguments]
        environ = {**os.environ, "LLM_USER_PATH": folder}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


FIXED = ("-o", "temperature", "0", "-o", "max_tokens", "12")


@check("a prompt, streamed and --no-stream; --system")
def prompt(site: Site) -> None:
    text = llm(site, "Say hello.", *FIXED)
    assert text.strip()
    same(llm(site, "Say hello.", "--no-stream", *FIXED), text)
    assert llm(site, "Say hello.", "--system", "You are brief.", *FIXED).strip()


@check("--schema")
def schema(site: Site) -> None:
    is_colour(llm(site, "Say hello.", "--schema", json.dumps(COLOUR_SCHEMA), "-o", "temperature", "0"))


@check("--functions (tools, which the model may call)")
def tools(site: Site) -> None:
    assert llm(site, "Say hello.", "--functions", _FUNCTION, *FIXED).strip()


@check("completion: true, with logprobs in the stream")
def completion(site: Site) -> None:
    text = llm(site, "Once upon a", "-o", "logprobs", "2", *FIXED, model="text")
    same(llm(site, "Once upon a", "--no-stream", *FIXED, model="text"), text)


if __name__ == "__main__":
    main("llm")
