"""Runs in a container: sends requests by plain Celery, as the user `client`, and collects every answer.

Prints a line `sent`, then a line of JSON: for each request its text, or what went wrong, and when the answer was seen.
"""

import json
import os
import sys
import time

from celery import Celery
from redis.exceptions import RedisError


def main() -> None:
    count, tokens, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    url = os.environ["REDIS_URL"]
    app = Celery(broker=url, backend=url)
    params = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    open_results = {}
    for number in range(count):
        messages = [{"role": "user", "content": f"Tell a long story about mill number {number}."}]
        open_results[number] = app.send_task(
            "headrace.generate",
            kwargs={"messages": messages, "sampling_params": params},
            queue=f"headrace.{os.environ['MODEL']}",
            argsrepr="",
            kwargsrepr="",
        )
    print("sent", flush=True)
    answers: dict[int, dict[str, object]] = {}
    end = time.time() + seconds
    while open_results and time.time() < end:
        for number, result in list(open_results.items()):
            try:
                state, value = result.state, result.result
            except (RedisError, OSError):  # it is being killed
                break
            if state in ("SUCCESS", "FAILURE"):
                text = value["outputs"][0]["text"] if state == "SUCCESS" else None
                answers[number] = {"text": text, "error": None if text is not None else str(value), "at": time.time()}
                del open_results[number]
        time.sleep(0.5)
    lost = {number: {"text": None, "error": "no answer", "at": time.time()} for number in open_results}
    print(json.dumps({**answers, **lost}), flush=True)
    os._exit(0)  # connections of Celery may wait for a server that is gone


main()
