"""Shards, and the nodes of a Redis Cluster as a process knows them."""

import re
from pathlib import Path

import pytest
import redis

from clock import Clock
from headrace_broker.server.cluster import ClusterNodes, RedirectedError
from headrace_broker.server.shards import SHARDS, id_in_keys, key_prefix, server_of, shard_of
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.url import ServerUrl

GIVEN = [("a", 1), ("b", 2)]
SLOTS = [[0, 8191, [b"a", 1, b"id"], [b"c", 3, b"id"]], [8192, 16383, [b"", 2, b"id"], [b"d", 4, b"id"]]]


def test_the_shards_of_the_documented_ids_are_as_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| `headrace:stream:({s\d\d}):([^`]+)` \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for request_id, shard, again in rows:
        assert (shard_of(request_id), request_id) == (shard, again)


def test_every_shard_gets_its_share() -> None:
    counts = dict.fromkeys(SHARDS, 0)
    for number in range(1600):
        counts[shard_of(f"r{number}")] += 1
    assert len(SHARDS) == 16
    assert all(60 < count < 140 for count in counts.values())


def test_a_home_names_the_server_and_the_shard() -> None:
    assert (server_of("c1{s07}"), key_prefix("c1{s07}"), id_in_keys("c1{s07}", "r")) == ("c1", "{s07}:", "{s07}:r")
    assert (server_of("s1"), key_prefix("s1"), id_in_keys("s1", "r")) == ("s1", "", "r")
    assert (server_of(""), key_prefix(""), id_in_keys("", "{s01}")) == ("", "", "{s01}")


def test_only_the_server_with_the_url_of_a_cluster_has_shards() -> None:
    urls = {"c1": "redis+cluster://a", "s1": "redis://b"}
    with redis.Redis() as main, StreamServers.connected(main, urls, 60) as servers:
        assert servers.names == ["c1", "s1"]
        assert servers.homes_of("c1") == [f"c1{shard}" for shard in SHARDS]
        assert servers.homes_of("s1") == ["s1"]
        assert servers.home_at("c1", "a") == f"c1{shard_of('a')}"
        assert (servers.home_at("s1", "a"), servers.home_at("", "a")) == ("s1", "")


def test_a_cluster_is_a_server_of_streams_only() -> None:
    url = ServerUrl.parse("rediss+cluster://u:%40@h:1,i", may_be_cluster=True)
    assert (url.kind, url.tls, url.hosts, url.db) == ("cluster", True, (("h", 1), ("i", 6379)), 0)
    assert (url.username, url.password, url.safe) == ("u", "@", "rediss+cluster://h:1,i/0")


def test_the_master_of_a_slot_is_the_first_node_of_its_range() -> None:
    nodes = ClusterNodes(GIVEN)
    assert nodes.master(("b", 2), SLOTS, 100) == ("a", 1)
    assert nodes.master(("b", 2), SLOTS, 9000) == ("b", 2)  # a node that does not know its own address
    assert nodes.to_ask() == [("b", 2), ("a", 1), ("c", 3), ("d", 4)]
    with pytest.raises(RedirectedError, match="no node of the Redis Cluster has the slot 100, says a:1"):
        nodes.master(("a", 1), SLOTS[1:], 100)


def test_another_node_is_asked_after_a_redirection() -> None:
    nodes = ClusterNodes(GIVEN)
    nodes.distrust()
    assert nodes.to_ask() == [("b", 2), ("a", 1)]


def test_a_node_that_did_not_answer_in_time_is_avoided_for_a_while() -> None:
    clock = Clock()
    nodes = ClusterNodes(GIVEN, clock)
    nodes.was_late(("a", 1))
    assert nodes.to_ask() == [("b", 2), ("a", 1)]
    with pytest.raises(redis.ConnectionError, match="the node a:1 did not answer in time"):
        nodes.check(("a", 1))
    nodes.check(("b", 2))
    clock.now += 3
    nodes.check(("a", 1))
    assert nodes.to_ask() == GIVEN
