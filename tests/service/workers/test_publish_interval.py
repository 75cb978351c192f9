"""A worker with a publish interval writes the tokens of several steps as one chunk."""

import time
from collections.abc import Callable

from headrace_broker.client.client import Client
from headrace_broker.streams.events import ChunkEvent
from service.workers.service import Service, assert_result_is_stream, results

INTERVAL = 5


def test_tokens_of_one_publish_interval_are_one_chunk_except_the_first_and_the_last(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    service.start_worker(publish_interval=INTERVAL).wait_ready()
    sent = time.monotonic()
    handle = service.generate("the wheel", max_tokens=40, ignore_eos=True)
    log = service.wait_ended([handle.id])[handle.id]
    seconds = time.monotonic() - sent
    assert_result_is_stream(results([handle])[handle.id], log)
    with Client(service.server.url, model="tiny") as client:
        chunks = [event for event in client.events(handle.id, timeout=60) if isinstance(event, ChunkEvent)]
    counts = [len(chunk.token_ids) for chunk in chunks]
    assert counts[0] == 1
    assert sum(counts) == 40
    assert len(counts) <= 2 + seconds / INTERVAL
    assert chunks[-1].finish_reason == "length"
