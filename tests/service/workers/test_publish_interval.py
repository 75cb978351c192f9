"""A worker with a publish interval writes the tokens of several steps as one chunk."""

from collections.abc import Callable

from headrace_broker.client import Client
from headrace_broker.events import ChunkEvent
from service.workers.service import Service, assert_result_is_stream, results


def test_tokens_of_one_publish_interval_are_one_chunk_except_the_first_and_the_last(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    service.start_worker(publish_interval=5).wait_ready()
    handle = service.generate("the wheel", max_tokens=40, ignore_eos=True)
    log = service.wait_ended([handle.id])[handle.id]
    assert_result_is_stream(results([handle])[handle.id], log)
    with Client(service.server.url, model="tiny") as client:
        chunks = [event for event in client.events(handle.id, timeout=60) if isinstance(event, ChunkEvent)]
    counts = [len(chunk.token_ids) for chunk in chunks]
    assert counts[0] == 1
    assert sum(counts) == 40
    assert len(counts) < 20  # two, unless the machine needs seconds for a step
    assert chunks[-1].finish_reason == "length"
