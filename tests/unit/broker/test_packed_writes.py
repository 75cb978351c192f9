from headrace_broker.streams.writer import StreamWrite, pack_writes, unpack_writes


def test_unpacked_writes_equal_the_packed_ones() -> None:
    writes = [
        StreamWrite.chunk("r1", 12, 7, index=1, token_ids=[1, 70000], text="é\U0001f600", finish_reason="stop"),
        StreamWrite.end("r2", 1, 0, finish_reason="cancelled"),
    ]
    assert unpack_writes(pack_writes(writes), ["r1", "r2"]) == writes
    assert unpack_writes(pack_writes(writes), ["r2", "r3"]) == writes[1:]
    assert unpack_writes(pack_writes([]), ["r1"]) == []
