"""Checks of Redis: that it answers, keeps messages, and lets this user do the work of its role."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import redis

from headrace_broker.errors import SettingsError
from headrace_broker.server.connections import CONNECTION_ERRORS, address_of, connect, connect_cluster
from headrace_broker.server.eviction import eviction_warning
from headrace_broker.server.persistence import persistence_is_ok, persistence_warning
from headrace_broker.server.restart_safety import restart_safety
from headrace_broker.server.rights import refused_commands
from headrace_broker.server.shards import SHARDS
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.url import ServerUrl
from headrace_broker.server.users import User
from headrace_broker.settings import BrokerSettings
from headrace_cli.doctor.finding import Finding, Status, sentence

_OLDEST_REDIS: Final = (7, 0)
_FULL: Final = 0.9
"""Share of maxmemory from which Redis is nearly full."""
_SKEW_SECONDS: Final = 1.0
_GREAT_SKEW_SECONDS: Final = 60.0
_SHOWN_COMMANDS: Final = 4


def check_other_servers(settings: BrokerSettings, role: User) -> Iterator[Finding]:
    """Check each other server of `HEADRACE_QUEUE_URLS` and `HEADRACE_STREAM_URLS`. Each text names the server."""
    others = dict.fromkeys(settings.url_by_queue.values(), "HEADRACE_QUEUE_URLS")
    others |= dict.fromkeys(settings.stream_url_by_name.values(), "HEADRACE_STREAM_URLS")
    for url, option in others.items():
        server = ServerUrl.parse(url, may_be_cluster=True)
        if server.kind == "cluster":
            yield from _or_refusal(server.safe, option, partial(_cluster_findings, server))
            continue
        other = replace(settings, redis_url=url)
        for finding in check_redis(other, role, option=option):
            is_named = other.safe_url in finding.text
            yield finding if is_named else replace(finding, text=f"{other.safe_url}: {finding.text}")
    yield from _check_stream_servers(settings)


def _check_stream_servers(settings: BrokerSettings) -> Iterator[Finding]:
    """Check that each server of the table has a URL that leads to it, and each URL a server of the table."""
    with connect(settings.redis_url) as client, StreamServers.connected(client, *settings.stream_servers) as servers:
        try:
            table = servers.refresh()
        except redis.RedisError:
            return  # another finding says why
        for name in (name for name, row in table.rows.items() if not row.is_lost):
            try:
                servers.of(name)
            except SettingsError as error:
                yield Finding("stream-servers", "failed", sentence(error), "correct HEADRACE_STREAM_URLS")
            except redis.RedisError:
                continue  # another finding says why
        for name in table.unreadable:
            text = f"The field {name} of headrace:stream-servers cannot be read, and is ignored."
            yield Finding("stream-servers", "warning", text, "delete the field, or add the server again")
        unused = [name for name in servers.names if name not in table.rows]
        if unused:
            text = f"No streams are placed on {', '.join(unused)}, which HEADRACE_STREAM_URLS names."
            yield Finding("stream-servers", "warning", text, "see `headrace streams list`")


def check_redis(
    settings: BrokerSettings, role: User, clock: Callable[[], float] = time.time, option: str = "--redis-url"
) -> Iterator[Finding]:
    """Check the server of the settings for a process of this role.

    `clock` is the time of this machine. `option` has the URL.
    """
    yield from _or_refusal(settings.safe_url, option, partial(_findings, settings, role, clock))


def _findings(settings: BrokerSettings, role: User, clock: Callable[[], float]) -> Iterator[Finding]:
    with connect(settings.redis_url) as client:
        client.ping()
        yield Finding("redis", "ok", f"Redis at {settings.safe_url} answers.")
        yield from _check_settings(client)
        yield _check_clock(client, clock)
        yield _check_rights(client, role, settings.server.username or "default")


def _cluster_findings(server: ServerUrl) -> Iterator[Finding]:
    """Check the masters of a Redis Cluster. Each text names the node. The rights of the user are not checked."""
    clients = connect_cluster(server.text, SHARDS)
    try:
        for client in clients:
            client.ping()
        yield Finding("redis", "ok", f"The Redis Cluster at {server.safe} answers.")
        for address, client in {address_of(client): client for client in clients}.items():
            for finding in _check_settings(client):
                yield replace(finding, text=f"{address}: {finding.text}")
    finally:
        for client in clients:
            client.close()


def _or_refusal(where: str, option: str, findings: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield these findings, or one that says why the server cannot be used."""
    try:
        yield from findings()
    except redis.AuthenticationError as error:
        remedy = f"give the role's user and password in {option}: redis://user:password@host:port/db"
        yield Finding(
            "redis", "failed", sentence(f"Redis at {where} refuses the user or its password: {error}"), remedy
        )
    except CONNECTION_ERRORS as error:
        remedy = f"start a server, or give its address with {option}; `headrace serve` starts one by itself"
        yield Finding("redis", "failed", sentence(f"Redis at {where} cannot be reached: {error}"), remedy)
    except redis.RedisError as error:
        yield Finding("redis", "failed", sentence(f"Redis at {where} refuses a command: {error}"), "see Redis's log")


def _check_settings(client: "redis.Redis") -> Iterator[Finding]:
    try:
        info = client.info()
    except redis.exceptions.NoPermissionError as error:
        text = sentence(f"The server's settings cannot be read: {error}")
        yield Finding("redis-settings", "warning", text, "grant this user +info")
        return
    yield check_version(info)
    yield _check_replication(info)
    yield from _check_persistence(client, info)
    yield _check_memory(info)


def check_version(info: Mapping[str, Any]) -> Finding:
    """Check the version in the reply to INFO."""
    if "valkey_version" in info:
        return Finding("redis-version", "ok", f"The server is Valkey {info['valkey_version']}.")
    version = str(info.get("redis_version", ""))
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers >= _OLDEST_REDIS:
        return Finding("redis-version", "ok", f"The server is Redis {version}.")
    text = f"The server is Redis {version or 'of an unknown version'}, and 7.0 is the oldest that is supported."
    return Finding("redis-version", "failed", text, "update it to Redis 7.0 or newer, or to Valkey")


def _check_replication(info: Mapping[str, Any]) -> Finding:
    if info.get("role") == "slave" and info.get("slave_read_only", 1):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        remedy = "give the address of the primary, or of the Sentinels: sentinel://host:port,.../0?master=name"
        text = f"The server is a read-only replica of {primary}: no request can be queued."
        return Finding("redis-replication", "failed", text, remedy)
    return Finding("redis-replication", "ok", "The server takes writes.")


def _check_persistence(client: "redis.Redis", info: Mapping[str, Any]) -> Iterator[Finding]:
    found = []
    if not persistence_is_ok(info):
        text = "The last write of the append-only file or the last snapshot failed: a restart may lose messages."
        remedy = "free disk space; Redis's log has the error (docs/runbooks/redis-persistence.md)"
        found.append(Finding("redis-persistence", "failed", text, remedy))
    warning = persistence_warning(info)
    if warning is not None:
        found.append(_from_warning("redis-persistence", "warning", warning))
    safety = restart_safety(client, info)
    status: Status = "failed" if safety.loads_all is False else "warning"
    found += [_from_warning("redis-restart", status, text) for text in safety.warnings]
    yield from found or [Finding("redis-persistence", "ok", "A restart of Redis keeps the messages.")]


def _check_memory(info: Mapping[str, Any]) -> Finding:
    warning = eviction_warning(info)
    if warning is not None:
        return _from_warning("redis-memory", "failed", warning)
    used, limit = info["used_memory"], info.get("maxmemory", 0)
    amount = f"{used / 2**20:.0f} MiB" + (f" of {limit / 2**20:.0f} MiB" if limit else ", without a limit")
    if limit and used > _FULL * limit:
        text = f"Redis uses {amount} of memory, and refuses writes when it is full."
        return Finding("redis-memory", "failed", text, "raise maxmemory (docs/runbooks/redis-memory.md)")
    return Finding("redis-memory", "ok", f"Redis evicts no keys, and uses {amount}.")


def _from_warning(check: str, status: Status, warning: str) -> Finding:
    """Split a warning of the log: what to do follows the semicolon."""
    text, _, remedy = warning.partition("; ")
    return Finding(check, status, sentence(text), remedy or "see docs/deployment.md")


def _check_clock(client: "redis.Redis", clock: Callable[[], float]) -> Finding:
    """Compare the clocks. Half of the round trip is the error of the comparison."""
    before = clock()
    try:
        seconds, microseconds = client.time()
    except redis.exceptions.NoPermissionError as error:
        return Finding("clock", "warning", sentence(f"The clocks cannot be compared: {error}"), "grant this user +time")
    after = clock()
    difference = (before + after) / 2 - (seconds + microseconds / 1e6)
    doubt = (after - before) / 2
    if abs(difference) - doubt <= _SKEW_SECONDS:
        return Finding(
            "clock", "ok", f"The clocks of this machine and of Redis's machine agree to {_SKEW_SECONDS:g} s."
        )
    behind = "ahead of" if difference > 0 else "behind"
    text = (
        f"The clock of this machine is {abs(difference):.1f} s {behind} that of Redis's machine: deadlines expire too"
        " early or too late by the difference."
    )
    status: Status = "failed" if abs(difference) > _GREAT_SKEW_SECONDS else "warning"
    return Finding("clock", status, text, "synchronise both clocks, for example with chrony")


def _check_rights(client: "redis.Redis", role: User, username: str) -> Finding:
    try:
        refused = refused_commands(client, role, username)
    except redis.exceptions.NoPermissionError as error:
        text = sentence(f"The rights of user {username} cannot be checked: {error}")
        return Finding("redis-rights", "warning", text, "grant this user +acl|dryrun or +@transaction")
    if not refused:
        return Finding("redis-rights", "ok", f"User {username} has the rights of the role {role.name}.")
    shown = ", ".join(" ".join(command) for command in refused[:_SHOWN_COMMANDS])
    more = f" and {len(refused) - _SHOWN_COMMANDS} more" if len(refused) > _SHOWN_COMMANDS else ""
    text = f"User {username} may not run {shown}{more}, which the role {role.name} needs."
    remedy = (
        f"give this user the rules of `user {role.name}` in deploy/redis/users.acl (docs/deployment.md#redis-users)"
    )
    return Finding("redis-rights", "failed", text, remedy)
