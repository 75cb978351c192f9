"""Send one request with plain Celery and print the answer: `pip install "celery[redis]"`, nothing of Headrace."""

import os

from celery import Celery

URL = os.environ.get("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")

app = Celery(broker=URL, backend=URL)
result = app.send_task(
    "headrace.generate",
    kwargs={"prompt": "Three rivers of Europe are", "sampling_params": {"max_tokens": 24, "temperature": 0}},
    queue=f"headrace.{MODEL}",
    expires=120,  # seconds
    argsrepr="",
    kwargsrepr="",  # or Celery puts a readable copy of the prompt into headers and events
)
answer = result.get(timeout=120)
if answer["error"] is not None:
    raise SystemExit(f"{answer['error']['code']}: {answer['error']['message']}")
print(answer["outputs"][0]["text"])
print(answer["usage"]["completion_tokens"], "tokens")
