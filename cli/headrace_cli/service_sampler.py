"""`ServiceSampler`: samples of the whole service, from Redis and from its workers' answers to remote control."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery

from headrace_broker.keys import queue_name
from headrace_broker.models.registry import known_models
from headrace_broker.queue.levels import QueueLevelReader, QueueLevels
from headrace_broker.server.queue_servers import QueueServers


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the service at one moment."""

    at: float
    """Seconds of a monotonic clock."""
    queues: Mapping[str, QueueLevels]
    """By model."""
    workers: Mapping[str, Mapping[str, Any]]
    """The answer to `engine_stats`, by worker name."""


class ServiceSampler:
    """Take samples. A sample omits workers that do not answer in time. Raises the errors of the Redis client.

    Args:
        client: Redis, for the models.
        app: Celery, for remote control. Its Redis user needs the rights of a worker or an operator.
        answer_seconds: how long to wait for the workers' answers.
        servers: the servers of the queues; without them, all queues are in `client`.
    """

    def __init__(
        self, client: "redis.Redis", app: Celery, *, answer_seconds: float = 0.5, servers: QueueServers | None = None
    ) -> None:
        self._client = client
        self._app = app
        self._reader = QueueLevelReader(client if servers is None else servers.of)
        self._answer_seconds = answer_seconds

    def sample(self) -> Sample:
        """Return the state of the service now."""
        names = sorted(known_models(self._client))
        levels = self._reader.read(queue_name(name) for name in names)
        replies = self._app.control.broadcast("engine_stats", reply=True, timeout=self._answer_seconds)
        workers = {name: answer for reply in replies or [] for name, answer in reply.items() if "engine" in answer}
        return Sample(time.monotonic(), dict(zip(names, levels.values(), strict=True)), workers)


def report(sample: Sample, before: Sample | None) -> dict[str, Any]:
    """Return the sample as plain data. Rates are computed since the sample `before`; without it they are None."""
    workers = [_worker(name, answer, sample, before) for name, answer in sorted(sample.workers.items())]
    slowest = [
        {"worker": worker["name"], **request} for worker in workers for request in worker.pop("slowest_requests")
    ]
    return {
        "queues": [_queue(model, levels) for model, levels in sample.queues.items()],
        "workers": workers,
        "slowest_requests": sorted(slowest, key=lambda request: request["seconds"], reverse=True)[:10],
    }


def _queue(model: str, levels: QueueLevels) -> dict[str, Any]:
    return {
        "model": model,
        "ready": levels.num_ready,
        "leased": levels.leased,
        "run_out": levels.run_out,
        "dead": levels.num_dead,
        "oldest_age_seconds": levels.oldest_age_seconds,
    }


def _worker(name: str, answer: Mapping[str, Any], sample: Sample, before: Sample | None) -> dict[str, Any]:
    engine, totals = answer["engine"], answer["totals"]
    used, total = engine["kv_blocks_used"], engine["kv_blocks_total"]  # None if the engine does not report it
    past = before.workers.get(name) if before is not None else None
    tokens_per_second = inputs_per_second = time_to_first_token = None
    if past is not None and before is not None and past["totals"]["requests"] <= totals["requests"]:
        seconds = sample.at - before.at
        if answer.get("pools"):
            inputs_per_second = (totals["inputs"] - past["totals"]["inputs"]) / seconds
        else:
            tokens_per_second = (totals["tokens"] - past["totals"]["tokens"]) / seconds
        first_tokens = totals["first_tokens"] - past["totals"]["first_tokens"]
        if first_tokens > 0:
            waited = totals["first_token_seconds"] - past["totals"]["first_token_seconds"]
            time_to_first_token = waited / first_tokens
    return {
        "name": name,
        **{key: answer[key] for key in ("model", "state", "slots_used", "slots")},
        "running": engine["running"],
        "waiting": engine["waiting"],
        "kv_cache_usage_ratio": None if used is None or total is None else used / max(total, 1),
        "tokens_per_second": tokens_per_second,
        "inputs_per_second": inputs_per_second,
        "mean_time_to_first_token_seconds": time_to_first_token,
        "slowest_requests": answer["slowest_requests"],
    }
