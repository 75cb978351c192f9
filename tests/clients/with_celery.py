"""Celery, as a producer that knows only the wire contract: embeddings and scores."""

import base64
import sys
from array import array

from celery import Celery
from checks import QUERY, TEXTS, Site, check, main, same, same_ranking, same_rows


def send(site: Site, task: str, model: str, serializer: str = "json", **kwargs):
    app = Celery(broker=site.redis_url, backend=site.redis_url, set_as_current=False)
    app.conf.update(task_serializer=serializer, result_serializer=serializer, accept_content=["json", "msgpack"])
    result = app.send_task(task, kwargs=kwargs, queue=f"headrace.{model}").get(timeout=60)
    same(result["error"], None)
    return result


def rows(result) -> list[list[float]]:
    data = result["data"]["bytes"]
    numbers = array("f", base64.b64decode(data) if isinstance(data, str) else data)
    if sys.byteorder == "big":
        numbers.byteswap()
    count = result["data"]["shape"][0]
    width = len(numbers) // count
    return [numbers[first : first + width].tolist() for first in range(0, len(numbers), width)]


@check("headrace.embed with JSON and with msgpack")
def embed(site: Site) -> None:
    for serializer in ("json", "msgpack"):
        result = send(site, "headrace.embed", site.embedder, serializer, input=TEXTS)
        same(result["data"]["shape"], [3, len(site.rows[0])])
        same_rows(rows(result), site.rows)


@check("headrace.score")
def score(site: Site) -> None:
    found = [row[0] for row in rows(send(site, "headrace.score", site.reranker, query=QUERY, documents=TEXTS))]
    same_ranking(sorted(enumerate(found), key=lambda each: -each[1]), site.ranking)


if __name__ == "__main__":
    main("celery")
