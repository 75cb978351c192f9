"""`Intruder`: a tenant with a producer's rights and the ids of others, who does with them whatever a producer can.

It writes messages and idempotency keys, nothing else. Whatever it does, the others' requests must be exact.
"""

import json
import random
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import redis

from headrace_broker import BrokerSettings, Client, HeadraceBrokerError
from service.workers.messages import EMBED, message
from service.workers.service import QUEUE

TENANT = "intruder"
_PAUSE_SECONDS = (0.02, 0.2)
_LISTS = (QUEUE, f"{QUEUE}\x06\x163")


class Intruder:
    """A thread that attacks requests from when they are sent until `stop`."""

    def __init__(self, settings: BrokerSettings, request_ids: Sequence[str], prompts: Sequence[str], seed: int) -> None:
        self._settings = settings
        self._ids = request_ids
        self._prompts = prompts
        self._draw = random.Random(seed)
        self._stopped = threading.Event()
        self.num_attacks = 0
        self._acts: list[Callable[[redis.Redis], object]] = [
            self._send_other_numbers_of_choices,
            self._send_another_prompt,
            self._send_wrong_parameters,
            self._send_malformed,
            self._send_undecodable,
            self._send_expired,
            self._send_delayed,
            self._send_unknown_task,
            self._send_unusual_headers,
            self._send_costly_to_tokenize,
            self._take_idempotency_keys,
            self._submit_under_the_id,
        ]
        self._thread = threading.Thread(target=self._run, name="intruder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        client = redis.Redis.from_url(self._settings.redis_url, socket_timeout=2, protocol=2)
        while not self._stopped.wait(self._draw.uniform(*_PAUSE_SECONDS)):
            try:
                self._draw.choice(self._acts)(client)
                self.num_attacks += 1
            except (redis.RedisError, OSError, HeadraceBrokerError):
                continue  # the server is away, or the client refuses what is asked
        client.close()

    def _push(self, client: "redis.Redis", kwargs: Any = None, raw: bytes | None = None, **changes: Any) -> str:
        """Under the id of another's request. It goes behind it in its own list, or into one that is served later."""
        packed = msgpack.packb([[], kwargs or {"prompt": "mine"}, EMBED]) if raw is None else raw
        text = json.dumps(message(packed, request_id=self._draw.choice(self._ids), tenant=TENANT, **changes))
        client.lpush(self._draw.choice(_LISTS), text)
        return text

    def _send_other_numbers_of_choices(self, client: "redis.Redis") -> None:
        params = {"n": self._draw.randrange(1, 4), "max_tokens": 50}
        self._push(client, {"prompt": self._draw.choice(self._prompts), "sampling_params": params})

    def _send_another_prompt(self, client: "redis.Redis") -> None:
        self._push(client, {"prompt": "an answer of my own"})

    def _send_wrong_parameters(self, client: "redis.Redis") -> None:
        self._push(client, {"prompt": "mine", "sampling_params": {"n": self._draw.choice([0, -1, "x", None])}})

    def _send_malformed(self, client: "redis.Redis") -> None:
        self._push(client, raw=msgpack.packb(self._draw.choice([[], {}, 5, [1, 2, 3], [[], {}, []]])))

    def _send_undecodable(self, client: "redis.Redis") -> None:
        odd: list[dict[str, Any]] = [{"content_type": "application/x-python-serialize"}, {"compression": "zlib"}, {}]
        self._push(client, raw=b"\xc1", **self._draw.choice(odd))

    def _send_expired(self, client: "redis.Redis") -> None:
        self._push(client, expires=(datetime.now(UTC) - timedelta(days=2)).isoformat())

    def _send_delayed(self, client: "redis.Redis") -> None:
        self._push(client, eta=(datetime.now(UTC) + timedelta(days=9)).isoformat())

    def _send_unknown_task(self, client: "redis.Redis") -> None:
        self._push(client, task=self._draw.choice(["os.system", "celery.chord_unlock", ""]))

    def _send_unusual_headers(self, client: "redis.Redis") -> None:
        made = message(msgpack.packb([[], {"prompt": "mine"}, EMBED]), request_id=self._draw.choice(self._ids))
        made["headers"]["tenant"] = TENANT
        text = json.dumps(made).replace('"headers": {', self._draw.choice(['"headers" : {', '"\\u0068eaders": {']))
        client.lpush(self._draw.choice(_LISTS), text)

    def _send_costly_to_tokenize(self, client: "redis.Redis") -> None:
        """Under an id of its own, so that a worker does look at it."""
        text = message(
            msgpack.packb([[], {"prompt": "ab " * 100_000}, EMBED]), request_id=f"{TENANT}-{self._draw.random()}"
        )
        text["headers"]["tenant"] = TENANT
        client.lpush(self._draw.choice(_LISTS), json.dumps(text))

    def _take_idempotency_keys(self, _: "redis.Redis") -> None:
        with Client(self._settings, model="tiny") as client:
            client.submit("mine", {"max_tokens": 2}, idempotency_key=f"k{self._draw.randrange(9)}", tenant=TENANT)

    def _submit_under_the_id(self, _: "redis.Redis") -> None:
        with Client(self._settings, model="tiny") as client:
            client.submit("mine", {"max_tokens": 2}, request_id=self._draw.choice(self._ids), tenant=TENANT)
