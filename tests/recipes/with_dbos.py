"""DBOS: the process is killed while the model answers; the next one rejoins the same request."""

import subprocess
import sys
from pathlib import Path

import dbos_steps
from checks import Site, check, main, same
from processes import NewStreams, until

COMMAND = [sys.executable, dbos_steps.__file__, "order-4711", "Describe a mill wheel at length."]


def outcome() -> str:
    """Run the recipe to its end and return what it prints; DBOS logs on standard error."""
    done = subprocess.run(COMMAND, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.rstrip("\n")


@check("kill -9 while the request runs; the next process rejoins it, and it runs once")
def rejoined(site: Site) -> None:
    streams = NewStreams(site.redis_url)
    first = subprocess.Popen(COMMAND, stdout=sys.stderr)

    def chunks() -> int:
        assert first.poll() is None, f"the recipe ended with status {first.returncode}"
        return sum(len(streams.entries(request_id)) > 1 for request_id in streams.ids())

    until(chunks, "first token")
    first.kill()
    first.wait()
    [request_id] = streams.ids()
    assert streams.entries(request_id)[-1][0] == "chunk", "the request ended before the process was killed"
    text = outcome()
    assert text
    same(streams.ids(), [request_id])
    kinds = [kind for kind, _ in streams.entries(request_id)]
    same((kinds.count("start"), kinds[-1]), (1, "end"))
    same(outcome(), text)  # the workflow has ended: DBOS has its answer
    same(streams.ids(), [request_id])
    assert Path("answers.sqlite").exists()


if __name__ == "__main__":
    main("dbos")
