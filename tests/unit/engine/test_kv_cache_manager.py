"""Block tables: how many blocks a request gets, what it shares, and what a refusal leaves behind."""

from __future__ import annotations

from headrace_engine.core.kv_cache_manager import KVCacheManager
from headrace_engine.requests.request import Request
from unit.engine.requests import request


def computed(kv: KVCacheManager, name: str, prompt: range | list[int], **more: str) -> Request:
    """A request whose whole prompt has been computed."""
    found = request(name, list(prompt), **more)
    kv.admit(found, [], found.num_tokens)
    found.num_computed_tokens = found.num_tokens
    kv.remember_full_blocks(found, found.num_computed_tokens)
    return found


def test_a_table_has_as_many_blocks_as_its_tokens_need() -> None:
    kv = KVCacheManager(10, 4)
    one = request(prompt=range(9))
    assert kv.admit(one, [], 4) == [1]
    one.num_computed_tokens = 4
    assert kv.extend(one, 4) == [2]
    one.num_computed_tokens = 8
    assert kv.extend(one, 1) == [3]
    one.num_computed_tokens = 9
    assert kv.extend(one, 3) == []
    assert kv.block_ids(one) == [1, 2, 3]
    kv.check_integrity([one])


def test_a_refused_extension_changes_nothing() -> None:
    kv = KVCacheManager(4, 4)
    first = computed(kv, "first", range(8))
    assert kv.extend(first, 8) is None
    kv.check_integrity([first])


def test_blocks_that_a_running_request_shares_cost_nothing() -> None:
    kv = KVCacheManager(4, 4)
    computed(kv, "first", range(8))
    second = request("second", [*range(8), *range(100, 110)])
    hits = kv.computed_blocks(second)
    assert len(hits) == 2
    assert kv.num_needed(hits, 18) == 3


def test_preemption_frees_what_nobody_else_holds_and_the_newcomer_does_not_share() -> None:
    kv = KVCacheManager(12, 4)
    first = computed(kv, "first", range(10))
    second = request("second", [*range(8), 50])
    kv.admit(second, kv.computed_blocks(second), 1)
    assert list(kv.freed_one_by_one([first, second], [])) == [(first, 1), (second, 4)]
    third = request("third", [*range(4), 60])
    assert list(kv.freed_one_by_one([first, second], kv.computed_blocks(third))) == [(first, 1), (second, 3)]


def test_blocks_that_a_hit_revives_do_not_count_as_free() -> None:
    kv = KVCacheManager(4, 4)
    kv.free(computed(kv, "first", range(8)))
    second = request("second", [*range(8), *range(100, 108)])
    hits = kv.computed_blocks(second)
    assert (len(hits), kv.pool.num_free) == (2, 3)
    assert kv.num_needed(hits, 16) == 4  # two to revive and two new
    kv.admit(second, hits, 4)
    assert kv.pool.num_free == 0


def test_a_hit_never_covers_the_last_token() -> None:
    kv = KVCacheManager(10, 4)
    computed(kv, "first", range(8))
    assert len(kv.computed_blocks(request("same", range(8)))) == 1
    assert len(kv.computed_blocks(request("longer", range(9)))) == 2


def test_a_hit_ends_at_the_first_difference() -> None:
    kv = KVCacheManager(10, 4)
    computed(kv, "first", range(12))
    other = [*range(4), 99, *range(5, 13)]
    assert len(kv.computed_blocks(request("other", other))) == 1


def test_equal_blocks_behind_different_prefixes_are_not_shared() -> None:
    kv = KVCacheManager(10, 4)
    computed(kv, "first", [1, 2, 3, 4, 5, 6, 7, 8])
    assert kv.computed_blocks(request("other", [5, 6, 7, 8, 9])) == []


def test_requests_of_another_salt_share_nothing() -> None:
    kv = KVCacheManager(10, 4)
    computed(kv, "first", range(8), cache_salt="tenant 1")
    assert kv.computed_blocks(request("second", range(9), cache_salt="tenant 2")) == []
    assert len(kv.computed_blocks(request("third", range(9), cache_salt="tenant 1"))) == 2


def test_a_block_is_offered_only_when_it_is_full() -> None:
    kv = KVCacheManager(10, 4)
    one = request("first", range(8))
    kv.admit(one, [], 8)
    kv.remember_full_blocks(one, 7)
    assert len(kv.computed_blocks(request("second", range(9)))) == 1


def test_without_prefix_caching_nothing_is_shared() -> None:
    kv = KVCacheManager(10, 4, enable_prefix_caching=False)
    computed(kv, "first", range(8))
    assert kv.computed_blocks(request("second", range(9))) == []


def test_freeing_twice_is_harmless() -> None:
    kv = KVCacheManager(10, 4)
    one = computed(kv, "first", range(8))
    kv.free(one)
    kv.free(one)
    kv.check_integrity([])
    assert kv.pool.num_free == 9


def test_tokens_that_are_generated_complete_blocks_too() -> None:
    kv = KVCacheManager(10, 4)
    one = computed(kv, "first", [1, 2, 3])
    one.append_token(4)
    one.num_computed_tokens = 4
    kv.remember_full_blocks(one, 4)
    assert len(kv.computed_blocks(request("second", [1, 2, 3, 4, 5]))) == 1
