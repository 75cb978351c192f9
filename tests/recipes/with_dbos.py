"""DBOS: the process is killed while the model answers; the next one rejoins the same request."""

import subprocess
import sys
from pathlib import Path

import dbos_steps
import httpx
from checks import Site, check, main, same
from openai import APITimeoutError, InternalServerError
from processes import WAIT_SECONDS, NewStreams, until

RECIPE = Path(dbos_steps.__file__)
ARGUMENTS = ["order-4711", "Describe a mill wheel at length."]


def outcome(recipe: Path) -> str:
    """Run the recipe to its end and return what it prints; DBOS logs on standard error."""
    command = [sys.executable, str(recipe), *ARGUMENTS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=WAIT_SECONDS)
    return done.stdout.rstrip("\n")


def edited() -> Path:
    """Return a copy of the recipe whose workflow has another source, as after a deployment."""
    copy, call = Path("edited.py"), "    return ask(question)\n"
    source = RECIPE.read_text(encoding="utf-8")
    assert call in source
    copy.write_text(source.replace(call, f"    # a comment\n{call}"), encoding="utf-8")
    return copy


@check("kill -9 while the request runs; the next process, of an edited file, rejoins it, and it runs once")
def rejoined(site: Site) -> None:
    streams = NewStreams(site.redis_url)
    first = subprocess.Popen([sys.executable, str(RECIPE), *ARGUMENTS], stdout=sys.stderr)

    def chunks() -> int:
        assert first.poll() is None, f"the recipe ended with status {first.returncode}"
        return sum(len(streams.entries(request_id)) > 1 for request_id in streams.ids())

    until(chunks, "first token")
    first.kill()
    first.wait()
    [request_id] = streams.ids()
    assert streams.entries(request_id)[-1][0] == "chunk", "the request ended before the process was killed"
    text = outcome(edited())
    assert text
    same(streams.ids(), [request_id])
    kinds = [kind for kind, _ in streams.entries(request_id)]
    same((kinds.count("start"), kinds[-1]), (1, "end"))
    same(outcome(RECIPE), text)  # the workflow has ended: DBOS has its answer
    same(streams.ids(), [request_id])
    assert Path("answers.sqlite").exists()


@check("an error is retried unless the gateway's x-should-retry is false")
def retried(_site: Site) -> None:
    request = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")

    def failure(**headers: str) -> InternalServerError:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return InternalServerError("", response=httpx.Response(500, headers=named, request=request), body=None)

    errors = [failure(), failure(x_should_retry="false"), APITimeoutError(request), ValueError()]
    same([*map(dbos_steps.may_pass, errors)], [True, False, True, False])


if __name__ == "__main__":
    main("dbos")
