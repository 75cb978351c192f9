"""Run llm-comply, a suite of another project for OpenAI's and Anthropic's APIs, against a gateway and a worker.

`make comply` installs the suite (MIT) into .venv-comply and runs this with its command. The tables are in
docs/gateway.md and docs/responses.md.
The exit status is 1 if a test fails for a reason that is not listed here, or if a listed test passes.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.local.process import LocalGateway, LocalWorker
from headrace_engine.checkpoints import default_model

# llm-comply skips its tests of reasoning unless the model's name contains the name of a reasoning model
SERVED_NAME: Final = f"{default_model.NAME}-as-o1-and-claude-4"
REFUSED: Final = "HTTP 400 (expected [200])"
REASONING: Final = (
    "it sends `reasoning`, a field of the Responses API that OpenAI's schema of chats lacks; it also sends "
    "`reasoning_effort`, which the default model's template does not read"
)
OPTIONS: Final = {"anthropic": ("--auth-header", "x-api-key", "--no-bearer")}
"""By format: further options for the suite."""
# By format and test: the first error that the test must report, and why.
EXPLAINED: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "openai-chat": {
        "chat-image-input": (REFUSED, "only text is supported, so the image is refused"),
        "chat-reasoning-summary": (REFUSED, REASONING),
    },
    "open-responses": {
        "image-input": (REFUSED, "only text is supported, so the image is refused"),
        "reasoning-summary": (REFUSED, "it sends `reasoning.effort`, which the default model's template does not read"),
    },
    "anthropic": {
        "anth-image-input": (REFUSED, "only text is supported, so the image is refused"),
        "anth-thinking-display": (REFUSED, "it asks for thinking, which the default model has not"),
    },
}
REQUEST_SECONDS: Final = 60
SUITE_SECONDS: Final = 600


def main() -> int:
    (command,) = sys.argv[1:]
    with running_gateway() as gateway:
        results = {form: results_of(command, gateway.url, form) for form in EXPLAINED}
    return max([show(form, found) for form, found in results.items()])


def show(form: str, results: list[dict[str, Any]]) -> int:
    """Print the table of one format; returns the exit status."""
    counts: Counter[str] = Counter()
    print(f"{form}\n\n| test | outcome | why |\n|---|---|---|")
    for result in results:
        outcome, why = outcome_of(form, result)
        counts[outcome] += 1
        print(f"| {result['id']} | {outcome} | {why} |")
    print(f"\n{counts['passed']} passed, {counts['explained']} explained, {counts['failed']} failed")
    passed = [result for result in results if result["status"] == "passed"]
    for warning, number in Counter(each for result in passed for each in result.get("warnings", ())).items():
        print(f"{number} passed with a warning: {warning}")
    explained = {result["id"] for result in results if outcome_of(form, result)[0] == "explained"}
    outdated = EXPLAINED[form].keys() - explained
    for name in sorted(outdated):
        print(f"{name} no longer fails as EXPLAINED says: correct its line there and in the docs")
    return 1 if counts["failed"] or outdated else 0


@contextmanager
def running_gateway() -> Iterator[LocalGateway]:
    """Run a gateway and a worker of the default model, at temperature 0 and with a short context.

    The suite sets neither a temperature nor `max_tokens`. A small model that is sampled sometimes writes without end.
    """
    model = str(default_model.fetch())
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(environ={}) as server,
        LocalWorker(
            model=model,
            redis_url=server.url,
            log=Path(folder) / "worker.log",
            served_model_name=SERVED_NAME,
            max_model_len=1024,
            override_generation_config=json.dumps({"temperature": 0}),
        ) as worker,
        LocalGateway(redis_url=server.url, log=Path(folder) / "gateway.log") as gateway,
    ):
        gateway.wait_ready()
        worker.wait_ready()
        yield gateway


def results_of(command: str, url: str, form: str) -> list[dict[str, Any]]:
    """Run all tests of a format. Raises RuntimeError if the suite gave no results."""
    options = ["--format", form, *OPTIONS.get(form, ()), "--json", "--timeout", str(REQUEST_SECONDS)]
    # the gateway has no key file, so any key will do
    target = ["--base-url", f"{url}/v1", "--api-key", "none", "--model", SERVED_NAME]
    suite = subprocess.run([command, *options, *target], capture_output=True, text=True, timeout=SUITE_SECONDS)
    try:
        results: list[dict[str, Any]] = json.loads(suite.stdout)["results"]
    except ValueError as error:
        raise RuntimeError(f"llm-comply ended with status {suite.returncode}: {suite.stderr[-2000:]}") from error
    return results


def outcome_of(form: str, result: dict[str, Any]) -> tuple[str, str]:
    """Return passed, explained or failed, and why; a skipped test counts as failed."""
    if result["status"] == "passed":
        return "passed", ""
    expected, reason = EXPLAINED[form].get(result["id"], (None, ""))
    if result["errors"][0] == expected:
        return "explained", reason
    return "failed", "; ".join(result["errors"])


if __name__ == "__main__":
    sys.exit(main())
