"""The models that workers are loading now, with their progress: the hash `headrace:loading`.

The registry (`registry.py`) has the models that were ever served. This hash is separate, because an entry of the
registry makes clients send requests and the exporter count a queue. A loading worker must do neither.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis

from headrace_broker.errors import MalformedEntryError
from headrace_broker.keys import LOADING_KEY, LOADING_SECONDS
from headrace_broker.models.registry import REGISTER_SECONDS, RegisteredModel
from headrace_broker.packing import pack, unpack
from headrace_wire.request import name_problems

_SEEN_SECONDS: Final = 1.5 * REGISTER_SECONDS
"""How long ago another worker may have registered a model that it serves."""


@dataclass(frozen=True, slots=True)
class LoadingModel:
    """A served name whose model at least one worker is loading."""

    name: str
    progress: float
    """Share of the weights that is loaded, 0 to 1, at the worker that has loaded most."""
    since: float
    """When the last of the workers began, in unix seconds."""
    workers: frozenset[str]
    """Names of the workers that are loading it."""

    def is_served(self, registered: RegisteredModel | None, now: float) -> bool:
        """Return whether another worker serves the model meanwhile.

        Args:
            registered: the model's entry of the registry. Only a worker that serves the model writes one.
            now: unix seconds.
        """
        if registered is None or abs(now - registered.seen) >= _SEEN_SECONDS:
            return False
        return registered.seen >= self.since or registered.worker not in self.workers


def report_loading(
    client: "redis.Redis", worker: str, names: Iterable[str], *, progress: float, since: float, now: float
) -> None:
    """Tell that a worker is loading the model of these served names. Repeat it within `LOADING_SECONDS`.

    Args:
        progress: share of the weights that is loaded, 0 to 1.
        since, now: unix seconds.
    """
    row = pack({"names": [*names], "progress": progress, "since": since, "seen": now})
    with client.pipeline(transaction=False) as pipeline:
        pipeline.hset(LOADING_KEY, worker, row)
        pipeline.expire(LOADING_KEY, LOADING_SECONDS)
        pipeline.execute()


def forget_loading(client: "redis.Redis", worker: str) -> None:
    """Tell that the worker is no longer loading."""
    client.hdel(LOADING_KEY, worker)


def loading_models(client: "redis.Redis") -> dict[str, LoadingModel]:
    """Return the models that workers are loading, by served name.

    Returns none if the user may not read the key, or if the key holds another Redis type.
    """
    try:
        return read_loading(client.hgetall(LOADING_KEY), time.time())
    except redis.exceptions.NoPermissionError:
        return {}
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return {}


def read_loading(raw: Mapping[Any, Any], now: float) -> dict[str, LoadingModel]:
    """Decode the hash. Rows that are malformed, or that a worker has not renewed in time, are left out."""
    rows: defaultdict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for field, packed in raw.items():
        try:
            row = unpack(packed)
            names, progress, since, seen = row["names"], float(row["progress"]), float(row["since"]), float(row["seen"])
        except (KeyError, TypeError, ValueError, OverflowError, MalformedEntryError):
            continue
        times_are_valid = -math.inf < since < now + LOADING_SECONDS and abs(now - seen) < LOADING_SECONDS
        if not times_are_valid or not 0 <= progress <= 1 or not isinstance(names, list):
            continue
        for name in [name for name in names if isinstance(name, str) and not name_problems("model", name)]:
            rows[name].append((progress, since, field.decode(errors="replace")))
    found = {}
    for name, reports in rows.items():
        progresses, times, workers = zip(*reports, strict=True)
        found[name] = LoadingModel(name, max(progresses), max(times), frozenset(workers))
    return found
