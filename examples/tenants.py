"""Two tenants share one queue: a backlog of low priority, and an urgent request that overtakes it. `pip install .`"""

import os
import time

from headrace_broker import Client, QueueFullError

URL = os.environ.get("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")

with Client(URL, model=MODEL) as client:
    try:
        backlog = client.submit_many(
            {"prompt": f"Summary {number}:", "priority": 9, "tenant": "acme", "sampling_params": {"max_tokens": 24}}
            for number in range(24)
        )
    except QueueFullError as error:  # HEADRACE_MAX_QUEUED_REQUESTS or ..._PER_TENANT is reached
        raise SystemExit(f"try again in {error.retry_after_seconds} s: {error}") from error
    sent = time.monotonic()
    urgent = client.submit(
        prompt="Name a river.",
        priority=0,
        tenant="beta",
        expires=60,
        idempotency_key="beta-order-4711",  # sent twice, it is still one request
        sampling_params={"max_tokens": 8},
    )
    answer = client.result(urgent)
    print("urgent:", repr(answer.outputs[0].text), f"after {time.monotonic() - sent:.2f} s")
    lengths = [client.result(request_id).usage.completion_tokens for request_id in backlog]
    print("backlog:", len(lengths), "answers,", sum(lengths), "tokens")
