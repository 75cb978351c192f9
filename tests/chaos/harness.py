"""Rounds of faults on a running service, and what each cost.

A round sends requests, waits until tokens flow, breaks something, and then waits for every stream to end. Nothing may
be lost, doubled or out of order, and every output must be what the same request gave undisturbed. All the while an
intruder attacks the requests with a producer's rights.
"""

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import celery.exceptions
import redis
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from chaos.faults import FAULTS, STREAM_SERVER_FAULTS, Fault, in_random_order
from chaos.http_reader import HttpReader, TextChoice
from chaos.intruder import TENANT, Intruder
from chaos.ledger import counted, told
from chaos.load import kinds
from chaos.site import Doomed, Site
from chaos.watcher import Watcher
from headrace_broker.keys import arrived_key, queue_lists
from headrace_cli.demo.stream_timing import percentile
from service.workers.service import QUEUE, ChoiceStream, assert_result_is_stream

REQUESTS_A_ROUND = 8
HTTP_REQUESTS_A_ROUND = 4
PRIORITY = 9
"""Of all that is checked, so that better requests preempt it."""
END_SECONDS = 300.0  # all workers may have to start again, on a slow machine
SETTLE_SECONDS = 120.0
_TOLD_SECONDS = 10.0


@dataclass
class Round:
    """One round's account; `problems` holds a sentence for each broken promise."""

    number: int
    fault: str
    requests: int = 0
    attacks: int = 0
    """What the intruder did meanwhile."""
    cut: int = 0
    """Requests that a cancel, a deadline or the isolation of suspects ended as intended."""
    resumed: int = 0
    """Requests that more than one attempt worked on."""
    http_requests: int = 0
    rejoined: int = 0
    """HTTP streams whose connection was lost and that continued at the next event."""
    lost: int = 0
    streams_lost: int = 0
    """Requests whose stream was on a server that lost its data. They are not counted as lost."""
    broken: int = 0
    """Streams out of order, with a token twice, or with other content than undisturbed."""
    gaps: list[float] = field(default_factory=list)
    """Longest silence of each stream after the fault began, seconds."""
    away: float | None = None
    """For how many seconds of it nobody could have gone on, see `faults`."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Harness:
    """Args:
    seed: of the choice of requests, faults, victims and times; the machine adds its own.
    """

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._draw = random.Random(seed)
        self._kinds = kinds()
        self._expected: dict[int, dict[int, ChoiceStream]] = {}
        self._expected_http: dict[int, dict[int, TextChoice]] = {}

    def learn(self) -> None:
        """Run every kind of request undisturbed."""
        self._site.wait_ready()
        handles = [self._site.service.send(kind.body) for kind in self._kinds]
        logs = self._site.service.wait_ended([handle.id for handle in handles], END_SECONDS)
        for number, handle in enumerate(handles):
            self._expected[number] = logs[handle.id].content
        readers = [self._read_over_http(number) for number in range(len(self._kinds))]
        self._wait(lambda: all(reader.is_done for reader in readers), END_SECONDS)
        for number, reader in enumerate(readers):
            reader.stop()
            assert reader.is_done, reader.problems
            assert reader.error is None, reader.error
            self._expected_http[number] = reader.choices
        self._site.service.wait_settled(SETTLE_SECONDS)

    def run(self, rounds: int, report: Callable[[Round], None], faults: Sequence[Fault] = FAULTS) -> list[Round]:
        done = []
        for number, fault in enumerate(in_random_order(faults, rounds, self._draw), 1):
            done.append(self._round(number, fault))
            report(done[-1])
        return done

    def _round(self, number: int, fault: Fault) -> Round:
        account = Round(number, fault.__name__)
        self._site.emptied.clear()
        started = time.monotonic()
        self._site.wait_ready()
        numbers = [self._draw.randrange(len(self._kinds)) for _ in range(REQUESTS_A_ROUND)]
        key_name = f"round-{account.number}"
        sent: dict[str, Any] = {"priority": PRIORITY, "headers": {"key_name": key_name}}
        handles = [self._site.send(self._kinds[each], **sent) for each in numbers]
        account.requests = len(handles)
        http_numbers = [self._draw.randrange(len(self._kinds)) for _ in range(HTTP_REQUESTS_A_ROUND)]
        readers = self._site.readers = [self._read_over_http(number) for number in http_numbers]
        account.http_requests = len(readers)
        watcher = Watcher(
            lambda request_id: self._site.url_of_stream(request_id, "subscriber"), [h.id for h in handles]
        )
        intruder = self._intrude(handles, numbers)
        try:
            self._wait_for_tokens(watcher, handles, at_least=self._draw.randrange(1, 80))
            open_streams = [handle.id for handle in handles if handle.id not in watcher.ended]
            broken_at = time.monotonic()
            account.away = self._strike(account, fault)
            self._wait(lambda: all(h.id in watcher.ended for h in handles if not self._is_lost(h.id)), END_SECONDS)
            self._wait(
                lambda: all(reader.is_done or reader.problems for reader in readers if not self._is_unread(reader)),
                END_SECONDS,
            )
            self._wait(
                lambda: all(self._site.service.stream(each.handle.id).end for each in self._site.doomed), END_SECONDS
            )
        finally:
            watcher.stop()
            for reader in readers:
                reader.stop()
            intruder.stop()
        account.attacks = intruder.num_attacks
        account.gaps = watcher.longest_gaps(broken_at, open_streams)
        lost = [h.id for h in handles if self._is_lost(h.id)]
        account.streams_lost = len(lost)
        for handle, kind_number in zip(handles, numbers, strict=True):
            if handle.id in lost:
                continue
            self._check(account, handle, kind_number, ended=handle.id in watcher.ended)
        for reader, kind_number in zip(readers, http_numbers, strict=True):
            if self._is_unread(reader):
                continue
            self._check_http(account, reader, kind_number)
        doomed, self._site.doomed = self._site.doomed, []
        for each in doomed:
            self._check_doomed(account, each)
        self._check_settled(account, [each.handle.id for each in doomed if each.code == "dead_letter"])
        if self._site.has_ledger:
            self._check_ledger(account, handles, key_name)
        self._site.forget([*handles, *(each.handle for each in doomed)])
        account.seconds = time.monotonic() - started
        return account

    def _is_lost(self, request_id: str | None) -> bool:
        """Whether the stream may have been on a server that lost its data in this round."""
        return request_id is not None and self._site.home_of(request_id) in self._site.emptied

    def _is_unread(self, reader: HttpReader) -> bool:
        """Whether a client of a gateway may have lost its stream. Before its first event it does not know its id."""
        is_lost = reader.is_lost or (reader.error or {}).get("code") == "stream_lost"
        return self._is_lost(reader.request_id) or (is_lost and bool(self._site.emptied))

    def _intrude(self, handles: Sequence[AsyncResult], numbers: Sequence[int]) -> Intruder:
        """Start the intruder when a worker has seen every request. An earlier message would take the id of one.

        Where a worker may take such a message although another one has seen the request, it gets ids of its own.
        """
        request_ids = [handle.id if self._site.has_shared_keys else uuid.uuid4().hex for handle in handles]
        last = queue_lists(QUEUE)[-1]
        self._wait(lambda: not self._site.client.exists(last, arrived_key(last)), 30.0)
        prompts = [self._kinds[number].prompt for number in numbers]
        return Intruder(self._site.settings_of("producer"), request_ids, prompts, self._draw.randrange(2**32))

    def _strike(self, account: Round, fault: Fault) -> float | None:
        try:
            return fault(self._site, self._draw)
        except AssertionError as error:  # a process did not come back; the other rounds still run
            account.problems.append(f"the fault was not overcome: {error}"[:400])
            return None

    def _wait_for_tokens(self, watcher: Watcher, handles: Sequence[AsyncResult], at_least: int) -> None:
        self._wait(lambda: all(watcher.num_tokens(h.id) >= at_least or h.id in watcher.ended for h in handles), 30.0)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._site.revive()
            time.sleep(0.01)

    def _check(self, account: Round, handle: AsyncResult, kind_number: int, *, ended: bool) -> None:
        name = f"{self._kinds[kind_number].name} request {handle.id}"
        if not ended:
            account.lost += 1
            account.problems.append(f"{name} did not end")
            return
        try:
            log = self._site.service.stream(handle.id)
            account.resumed += len(log.attempts) > 1
            assert log.end is not None
            assert log.end["error"] is None, f"ended with {log.end['error']}"
            assert log.content == self._expected[kind_number], "other content than undisturbed"
            assert_result_is_stream(result_of(handle), log)
            self._site.check(handle.id, log)
        except (AssertionError, redis.RedisError, TimeoutError, celery.exceptions.TimeoutError) as error:
            account.broken += 1
            account.problems.append(f"{name}: {type(error).__name__} {error}"[:400])

    def _check_doomed(self, account: Round, doomed: Doomed) -> None:
        """It has its error, and what it has given until then is what it gave undisturbed; or it was quicker."""
        account.requests += 1
        try:
            log = self._site.service.stream(doomed.handle.id)
            assert log.end is not None, "did not end"
            expected = self._expected[doomed.kind] if doomed.kind is not None else {}
            if log.end["error"] is None:
                assert log.content == expected, "other content than undisturbed"
                return
            assert log.end["error"]["code"] == doomed.code, f"ended with {log.end['error']}"
            parts = [(index, choice.token_ids, choice.text) for index, choice in log.content.items()]
            with contextlib.suppress(TaskRevokedError):  # what Celery has of a request that its own command ended
                result = result_of(doomed.handle)
                assert result["error"]["code"] == doomed.code, f"the result has {result['error']}"
                parts += [(output["index"], output["token_ids"], output["text"]) for output in result["outputs"]]
            for index, token_ids, text in parts:
                known = expected.get(index, ChoiceStream())
                assert token_ids == known.token_ids[: len(token_ids)], "other tokens than undisturbed"
                whole = text.removesuffix("\ufffd")  # it may end within a character
                tail = f"{whole[-20:]!r} where it was {known.text[: len(whole)][-20:]!r}"
                assert whole == known.text[: len(whole)], f"other text of {len(token_ids)} tokens: {tail}"
            account.cut += 1
        except (AssertionError, redis.RedisError, TimeoutError, celery.exceptions.TimeoutError) as error:
            account.broken += 1
            problem = f"a request that was to end with {doomed.code}: {type(error).__name__} {error}"
            account.problems.append(problem[:400])

    def _check_ledger(self, account: Round, handles: Sequence[AsyncResult], key_name: str) -> None:
        """It has each request once, with the tokens of its result."""
        try:
            results = [result_of(handle) for handle in handles]
        except (redis.RedisError, TimeoutError, celery.exceptions.TimeoutError, TaskRevokedError):
            return  # `_check` has told it
        found, expected = counted(self._site.client, key_name), told(results)
        if found != expected:
            account.problems.append(f"the ledger has requests and tokens {found} where the results have {expected}")

    def _read_over_http(self, kind_number: int) -> HttpReader:
        kind = self._kinds[kind_number]
        body = {"model": "tiny", "prompt": kind.prompt, "priority": PRIORITY, **kind.params}
        return HttpReader(lambda: self._site.gateway_ports, body, self._draw.randrange(2**32))

    def _check_http(self, account: Round, reader: HttpReader, kind_number: int) -> None:
        name = f"{self._kinds[kind_number].name} request over HTTP"
        account.rejoined += reader.num_rejoins > 0
        account.problems += [f"{name}: {problem}"[:400] for problem in reader.problems]
        if not reader.is_done:
            account.lost += 1
            account.problems.append(f"{name} did not end")
        elif reader.error or reader.problems or reader.choices != self._expected_http[kind_number]:
            account.broken += 1
            other = f"other content than undisturbed: {reader.choices}, not {self._expected_http[kind_number]}"
            account.problems.append(f"{name}: {reader.error or other}"[:4000])

    def _check_settled(self, account: Round, poisoned: Sequence[str]) -> None:
        """No message queued or leased, no dead letter but the poison's, no command refused, no worker that gave up."""
        try:
            self._site.service.wait_settled(SETTLE_SECONDS)
        except AssertionError as error:
            account.problems.append(f"messages are left over: {error}"[:400])
        dead = [letter for letter in self._site.service.dead_letters() if TENANT.encode() not in letter[b"body"]]
        for request_id in poisoned:
            found = [letter for letter in dead if request_id.encode() in letter[b"body"]]
            if len(found) != 1 or not found[0][b"reason"].startswith(b"poison"):
                account.problems.append(f"the poison is not one dead letter: {[letter[b'reason'] for letter in found]}")
            dead = [letter for letter in dead if letter not in found]
        if dead:
            account.problems.append(f"{len(dead)} dead letters: {[letter[b'reason'] for letter in dead]}"[:400])
        self._site.client.delete(f"headrace:dead:{QUEUE}")
        account.problems += self._site.take_refusals()
        gone = self._site.take_ended()
        account.problems += [f"a worker ended by itself, see {log}" for log in gone]


def summary(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """A line for each fault, and one for all."""
    all_faults = (*FAULTS, *STREAM_SERVER_FAULTS)
    names = [fault.__name__ for fault in all_faults if any(r.fault == fault.__name__ for r in rounds)]
    lines = [_line(name, [r for r in rounds if r.fault == name]) for name in names]
    return [*lines, _line("all", rounds)]


def _line(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    gaps = [gap for r in rounds for gap in r.gaps]
    beyond = [gap - r.away for r in rounds if r.away is not None for gap in r.gaps]
    return {
        "fault": name,
        "rounds": len(rounds),
        "requests": sum(r.requests for r in rounds),
        "attacks": sum(r.attacks for r in rounds),
        "cut": sum(r.cut for r in rounds),
        "resumed": sum(r.resumed for r in rounds),
        "http_requests": sum(r.http_requests for r in rounds),
        "rejoined": sum(r.rejoined for r in rounds),
        "lost": sum(r.lost for r in rounds),
        "streams_lost": sum(r.streams_lost for r in rounds),
        "broken": sum(r.broken for r in rounds),
        "problems": sum(len(r.problems) for r in rounds),
        "silence_p50_seconds": _rounded(gaps, 50),
        "silence_p99_seconds": _rounded(gaps, 99),
        "beyond_away_p99_seconds": _rounded(beyond, 99),
    }


def _rounded(values: Sequence[float], percent: int) -> float | None:
    return round(percentile(values, percent), 2) if values else None


def result_of(handle: AsyncResult) -> Any:
    """Get the result as a client does.

    When Celery's client reconnects, it reads the stored results, and subscribes after that. It is never told of one
    that is stored in between, as happens when Redis has restarted. A second call reads it.
    """
    with contextlib.suppress(celery.exceptions.TimeoutError):
        return handle.get(timeout=_TOLD_SECONDS)
    return handle.get(timeout=SETTLE_SECONDS)
