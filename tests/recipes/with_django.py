"""Django: requests by plain Celery, their streams, and the task that stores their answers."""

import json
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

from checks import Site, check, main, same
from processes import answer, events, running, served, status_of, until


@contextmanager
def site() -> Iterator[str]:
    command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--settings", "django_answers.settings"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    worker = ("celery", "--app", "django_answers", "worker", "--pool", "solo", "--loglevel", "warning")
    with running(*worker), served("django_answers.asgi:app") as url:
        yield url


def ask(url: str, question: str) -> str:
    body = urllib.parse.urlencode({"question": question}).encode()
    return f"{url}/answers/{json.load(answer(f'{url}/answers', body))['id']}"


def ended(page: str) -> dict[str, str]:
    def found() -> dict[str, str] | None:
        shown = json.load(answer(page))
        return None if shown["state"] == "waiting" else shown

    return until(found, "stored answer")


@check("send_task, the stream left and rejoined, the answer stored by a link, the errback, a wrong Last-Event-ID")
def all_of_it(_site: Site) -> None:
    with site() as url:
        page = ask(url, "Name three rivers.")
        with answer(f"{page}/stream") as response:
            first = next(events(response))
        with answer(f"{page}/stream", Last_Event_ID=first["id"]) as response:
            *rest, end = events(response)
        same(end, {"event": "end", "data": {"error": None}})
        text = "".join(event["data"]["text"] for event in (first, *rest))
        assert rest and text
        same(ended(page), {"state": "done", "text": text})

        refused = ask(url, "river " * 20_000)
        with answer(f"{refused}/stream") as response:
            same([*events(response)], [{"event": "end", "data": {"error": "context_length_exceeded"}}])
        same(ended(refused), {"state": "failed", "text": ""})
        same(status_of(f"{page}/stream", Last_Event_ID="$"), 400)


if __name__ == "__main__":
    main("Django")
