"""Django: requests by plain Celery, their streams, and the task that stores their answers."""

import json
import os
import subprocess
import sys
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock, patch

import msgpack
import redis
from checks import Site, check, main, same
from processes import answer, events, running, served, status_of, until

APP = "django_answers.asgi:app"


def migrate() -> None:
    command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--settings", "django_answers.settings"]
    subprocess.run(command, check=True, stdout=sys.stderr)


@contextmanager
def site() -> Iterator[str]:
    migrate()
    worker = ("celery", "--app", "django_answers", "worker", "--pool", "solo", "--loglevel", "warning")
    with running(*worker), served(APP) as url:
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
        for wrong in ("$", f"{2**64}-0"):
            same(status_of(f"{page}/stream", Last_Event_ID=wrong), 400)
        same(status_of(f"{url}/answers", b""), 400)


@check("a reader who waits more than 5 s, `gone` for an expired stream, 404 without a row, 503 without Redis")
def without_a_stream(site: Site) -> None:
    migrate()
    import django_answers.asgi  # noqa: F401  # sets Django up
    from django_answers.models import Answer

    row = Answer.objects.create(question="Name three rivers.")
    with served(APP) as url:
        page, key = f"{url}/answers/{row.id}", f"headrace:stream:{row.id}"
        client = redis.Redis.from_url(site.redis_url)
        with answer(f"{page}/stream") as response:
            same(response.readline(), b": waiting\n")
            client.xadd(key, {"type": "end", "data": msgpack.packb({"error": None})})
            same([*events(response)], [{"event": "end", "data": {"error": None}}])
        client.delete(key)
        Answer.objects.update(state="done")
        with answer(f"{page}/stream") as response:
            same((response.headers["Cache-Control"], response.headers["X-Accel-Buffering"]), ("no-cache", "no"))
            same(response.readline(), b"event: gone\n")  # at once: `: waiting` would come first
        same(status_of(f"{url}/answers/{uuid.uuid4()}/stream"), 404)
    with patch.dict(os.environ, HEADRACE_REDIS_URL="redis://127.0.0.1:1/0"), served(APP) as url:
        same(status_of(f"{url}/answers", b"question=Name+three+rivers."), 503)
    same(Answer.objects.filter(state="failed").count(), 1)


@check("the tasks try again while the database is away")
def database_away(_site: Site) -> None:
    import django_answers.asgi  # noqa: F401  # sets Django up
    from django.db import OperationalError
    from django_answers import tasks

    result = {"request_id": "an id", "outputs": [{"text": "a text"}]}
    for task, argument in ((tasks.store, result), (tasks.fail, "an id")):
        update = Mock(side_effect=[*[OperationalError()] * 5, 1])
        with patch.object(tasks.Answer.objects, "filter", Mock(return_value=Mock(update=update))):
            task.apply([argument]).get()  # in this process, where Celery does not wait between two tries
        same(update.call_count, 6)


if __name__ == "__main__":
    main("Django")
