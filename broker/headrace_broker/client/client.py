"""The client for producers and subscribers. `async_client.py` has the client for asyncio.

Importing this module imports neither Celery nor what only some calls need: their first use does, so that a program
that only reads streams starts sooner.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import redis

from headrace_broker.call_rules import (
    BEGINNING,
    check_all,
    check_last_id,
    check_last_ids,
    check_limit,
    check_request_id,
    check_timeout,
)
from headrace_broker.client.idempotency import IdempotencyKeys
from headrace_broker.client.submission import (
    STREAM_STATUS,
    RequestStatus,
    Submission,
    SubmitOptions,
    SubmitRequest,
    cancel_call,
    cancelled_in_advance,
    chunk_of,
    prepare,
    prepare_all,
    read_result,
    read_status,
    require_model,
    was_cancelled,
)
from headrace_broker.client.tracing import ClientTracing
from headrace_broker.client.unavailable import unavailable
from headrace_broker.client.usage_calls import UsageCalls
from headrace_broker.errors import (
    QueueFullError,
    ResultTimeoutError,
    StreamExpiredError,
    TenantQueueFullError,
    UnknownModelError,
)
from headrace_broker.keys import ended_key, listener_key, queue_name, result_key, stream_key
from headrace_broker.models.registry import RegisteredModel, known_models
from headrace_broker.results import GenerateResult
from headrace_broker.server.asking_homes import AwayHomes, ask_homes, unless_away
from headrace_broker.server.connections import CONNECTION_ERRORS, address_of, connect
from headrace_broker.server.queue_servers import OTHER_TIMEOUT, QueueServers
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_broker.settings import BrokerSettings, as_settings
from headrace_broker.streams.events import ChunkEvent, StreamEvent
from headrace_broker.streams.following import FollowingThread
from headrace_broker.streams.listeners import (
    get_abandon_after,
    read_abandon_after,
    send_heartbeat,
    start_heartbeats,
    wait_seconds,
)
from headrace_broker.streams.subscriber import read_streams
from headrace_broker.streams.writer import END_STREAM

if TYPE_CHECKING:
    from headrace_broker.client.decision_calls import DecideOptions
    from headrace_broker.client.message_sender import MessageSender
    from headrace_broker.client.pooling_calls import EmbedOptions, Inputs, PairInputs, PoolingCall, ScoreOptions
    from headrace_broker.decisions import Decided
    from headrace_broker.models.loading_models import LoadingModel
    from headrace_broker.pooling_results import Pooled, RankedDocument
    from headrace_broker.queue.dead_letters import DeadLetter
    from headrace_broker.queue.levels import QueueLevelReader, QueueLevels
    from headrace_broker.queue.purge import PurgedMessages

READ_RETRIES: Final = 3
STREAM_RETRIES: Final = 1
"""Of a stream server. One that hangs holds a call up for 4 s, and another server may have the answer."""
_BATCH: Final = 200


class Client(UsageCalls):
    """Submits requests, follows their token streams and fetches their results. Threads may share it.

    `broker` is a Redis URL or settings. Without it, settings come from the environment, such as `HEADRACE_REDIS_URL`.
    `model` is the served name that requests use unless they name another. With `check_model`, a model that no worker
    ever served is refused, unless no model was ever served at all. `tracer_provider` is OpenTelemetry's; the default is
    the global one. Every method raises QueueUnavailableError if Redis cannot be reached.
    """

    def __init__(
        self,
        broker: str | BrokerSettings | None = None,
        *,
        model: str | None = None,
        check_model: bool = True,
        tracer_provider: Any = None,
    ) -> None:
        settings = as_settings(broker)
        self._redis: Final = connect(settings.redis_url, retries=READ_RETRIES)
        servers = QueueServers(self._redis, settings.url_by_queue, retries=READ_RETRIES)
        super().__init__(settings, servers, IdempotencyKeys(self._redis))
        self.tracing: Final = ClientTracing(tracer_provider)
        self._model: Final = None if model is None else require_model(model)
        self._check_model: Final = check_model
        self._served: Final[set[str]] = set()
        self._sender: MessageSender | None = None
        self._sender_lock: Final = threading.Lock()
        self._levels_lock: Final = threading.Lock()
        self._streams: Final = StreamServers.connected(
            self._redis, *self.settings.stream_servers, retries=STREAM_RETRIES, timeout=OTHER_TIMEOUT
        )
        self._following: Final = FollowingThread(self.settings.redis_url, *self.settings.stream_servers)

    @cached_property
    def _levels(self) -> QueueLevelReader:
        from headrace_broker.queue.levels import QueueLevelReader

        return QueueLevelReader(self._servers.of)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        if self._sender is not None:
            self._sender.close()
        self._following.close()
        self._streams.close()
        self._servers.close()
        self._redis.close()

    def submit(
        self,
        prompt: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> str:
        """Put one request into its model's queue and return its id.

        If a request of the same `idempotency_key`, model and tenant was sent within the last day, nothing is sent and
        the id of that request is returned, whether or not it succeeded. A `request_id` that was used is refused.

        Exactly one of `prompt`, `messages` and `prompt_token_ids` must be given. Raises InvalidRequestError with every
        problem, UnknownModelError for a model that was never served, QueueFullError if the queue is at the limit of the
        settings, and its subclass TenantQueueFullError if the tenant is at its limit.

        With `abandon_after`, the request is cancelled if no process reads its stream or waits for its result for that
        many seconds. That includes the time in the queue: a worker checks it when it takes the request.
        """
        request: SubmitRequest = {"prompt": prompt, "sampling_params": sampling_params, **options}
        submission = prepare(request, default_model=self._model)
        with unavailable(self.settings, "submit a request"):
            [request_id] = self._submit([submission])
        return request_id

    def submit_many(self, requests: Iterable[SubmitRequest]) -> list[str]:
        """Put many requests into their queues, several times faster than one by one, and return their ids.

        All are checked before the first is sent. If Redis fails midway, some may have been queued.
        """
        submissions = prepare_all(requests, default_model=self._model)
        with unavailable(self.settings, "submit requests"):
            return self._submit(submissions, batch_size=_BATCH)

    def stream(
        self, request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
    ) -> Iterator[ChunkEvent]:
        """Yield the chunks after the entry `last_id`, each once and in order, until the request has ended.

        To resume later, keep the `entry_id` of the last chunk. If the stream does not exist yet, this waits for it.
        Raises RequestFailedError at the end of a request that did not succeed, ResultTimeoutError if no entry arrives
        for `timeout` seconds, StreamExpiredError if the stream has expired.
        """
        for event in self.events(request_id, last_id=last_id, timeout=timeout):
            if (chunk := chunk_of(request_id, event)) is not None:
                yield chunk

    def events(
        self, request_id: str, *, last_id: str | None = BEGINNING, timeout: float | None = None
    ) -> Iterator[StreamEvent]:
        """Yield every event: starts, chunks, and the end with its usage or error. Arguments are those of `stream`."""
        with unavailable(self.settings, "read a stream"):
            span = self.tracing.receiving(check_request_id(request_id))
            try:
                for _, event in self._read_streams({request_id: last_id}, timeout):
                    if isinstance(event, StreamExpiredError):
                        raise event
                    span.record(event)
                    yield event
            finally:
                span.close()

    def events_many(
        self, request_ids: Iterable[str] | Mapping[str, str | None], *, timeout: float | None = None
    ) -> Iterator[tuple[str, StreamEvent | StreamExpiredError]]:
        """Yield (request id, event) of many streams as they arrive, over one connection, until all have ended.

        If `request_ids` is a map, its values are the entry ids after which the streams are read. This is much cheaper
        than one reader per stream. The last item of a stream is its EndEvent, which has the error of a failed request.
        For a stream that has expired, a StreamExpiredError is yielded, not raised. The other streams continue. Raises
        ResultTimeoutError if one of the streams gets no entry for `timeout` seconds.
        """
        with unavailable(self.settings, "read streams"):
            yield from self._read_streams(check_last_ids(request_ids), timeout)

    def _read_streams(
        self, last_ids: Mapping[str, str | None], timeout: float | None
    ) -> Iterator[tuple[str, StreamEvent | StreamExpiredError]]:
        for request_id in last_ids:
            self._streams.homes(request_id)  # raises SettingsError if a stream server has no URL
        if self._streams.is_single:
            return read_streams(self._redis, last_ids, timeout=timeout)
        return self._following.follow({name: check_last_id(last_id) for name, last_id in last_ids.items()}, timeout)

    def result(self, request_id: str, timeout: float | None = None) -> GenerateResult:
        """Wait for the complete result. Raises RequestFailedError or ResultTimeoutError."""
        key = result_key(check_request_id(request_id))
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        abandon_after: float | None = None
        with unavailable(self.settings, "wait for a result"), self._redis.pubsub() as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(key)
            while True:
                # The first message confirms the subscription. The read after it cannot miss a result.
                with self._redis.pipeline(transaction=False) as pipe:
                    pipe.get(key)
                    get_abandon_after(pipe, request_id)
                    meta, listener = pipe.execute()
                if isinstance(meta, bytes) and (result := read_result(request_id, meta)) is not None:
                    return result
                # a worker that requeues the request deletes the listener key, and the next worker sets it again
                abandon_after = self._send_heartbeat(request_id, listener) or abandon_after
                left = wait_seconds(deadline, abandon_after)
                if left <= 0:
                    raise ResultTimeoutError(request_id, timeout or 0, "result")
                pubsub.get_message(timeout=left)

    def _send_heartbeat(self, request_id: str, on_main: bytes | None) -> float | None:
        """Send the subscriber heartbeat of a request, if it needs one. Return its `abandon_after`.

        `on_main` is the value of its key on the main server.
        """
        found = None
        for home in self._streams.homes(request_id):
            with unless_away(home):
                server = self._streams.of(home)
                value: Any = on_main if home == MAIN else server.get(listener_key(id_in_keys(home, request_id)))
                if (abandon_after := read_abandon_after(value)) is not None:
                    found = abandon_after
                    send_heartbeat(server, id_in_keys(home, request_id))
        return found

    def embed(self, texts: Inputs, *, timeout: float | None = None, **options: Unpack[EmbedOptions]) -> Pooled:
        """Compute one embedding for each text, or list of token ids, and wait for all.

        More than 256 inputs, or 16,384 tokens by an estimate, become several messages. Raises InvalidRequestError with
        every problem, RequestFailedError if a message did not succeed, ResultTimeoutError if a message makes no
        progress for `timeout` seconds, and the errors of `submit`.
        """
        from headrace_broker.client.pooling_calls import pooling_call

        return self._pool(pooling_call("embed", {"input": texts}, options, self._model), timeout)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Pooled:
        """Score each document for the query, or for the query with the same index. Errors are those of `embed`."""
        from headrace_broker.client.pooling_calls import score_call

        return self._pool(score_call(query, documents, options, self._model), timeout)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[RankedDocument]:
        """Return the indices and scores of the `top_n` best documents, the best first; None or 0 returns all."""
        from headrace_broker.client.pooling_calls import check_top_n
        from headrace_broker.pooling_results import ranking_of

        check_top_n(top_n)
        return ranking_of(self.score(query, documents, timeout=timeout, **options).rows.tolist(), top_n)

    def classify(self, inputs: PairInputs, *, timeout: float | None = None, **options: Unpack[ScoreOptions]) -> Pooled:
        """Compute the classes of each text, pair of texts or list of token ids. Errors are those of `embed`."""
        from headrace_broker.client.pooling_calls import pooling_call

        return self._pool(pooling_call("classify", {"input": inputs}, options, self._model), timeout)

    def decide(
        self,
        given: str | Sequence[Mapping[str, Any]],
        questions: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[DecideOptions],
    ) -> Decided:
        """Answer 1 to 400 questions about one input, a text or the messages of a chat, in one message.

        Questions and answers have the fields of OpenAI's decisions. Errors are those of `embed`.
        """
        from headrace_broker.client.decision_calls import decision_call

        call = decision_call(given, questions, options, self._model)
        answer = call.answer(self.submit_pooling(call.submissions))
        for request_id, event in self.events_many(answer.request_ids, timeout=timeout):
            answer.add(request_id, event)
        return answer.whole()

    def submit_pooling(self, submissions: Sequence[Submission]) -> list[str]:
        """Put the messages of a PoolingCall or DecisionCall, or some of them, into their queue and return their ids."""
        with unavailable(self.settings, "submit requests"):
            return self._submit(submissions, batch_size=_BATCH if len(submissions) > 1 else 0)

    def _pool(self, call: PoolingCall, timeout: float | None) -> Pooled:
        answer = call.answer(self.submit_pooling(call.submissions))
        for request_id, event in self.events_many(answer.request_ids, timeout=timeout):
            answer.add(request_id, event)
        return answer.whole()

    def cancel(self, request_id: str) -> bool:
        """Cancel the request. One that waits in the queue does not run; a running one stops at its next chunk.

        Returns False if it had already ended in another way. An unknown id (see `is_known`) is cancelled in advance:
        a request that is submitted with it within a day does not run. Raises
        StreamServerUnavailableError if a server that may have the stream is away, and no other has it.
        """
        check_request_id(request_id)
        with unavailable(self.settings, "cancel a request"):
            ttl_seconds = self.settings.result_ttl_seconds
            homes = self._streams.homes_now(request_id)
            if len(homes) > 1:  # an end at another server than that of the stream would be an answer of its own
                found_at = self._statuses(homes, request_id, "cancel a request")
                homes = [home for home, reply in found_at.items() if not cancelled_in_advance(reply)] or homes
            away, found = AwayHomes(self._streams, "cancel a request"), []
            for home in homes:  # all of them, also after one that had ended in another way
                with away.noted(home):
                    end = self._streams.of(home).register_script(END_STREAM.text)
                    found.append(end(**cancel_call(request_id, ttl_seconds, home)))
            away.check()
            return all(map(was_cancelled, found))

    def is_known(self, request_id: str) -> bool | None:
        """Return whether the request has a stream, a result or a queued message; None if this user may not read them.

        It searches the messages of all models that were ever served, so do not call it for every request. Raises
        StreamServerUnavailableError if it finds nothing, and a server that may have the stream is away.
        """
        from headrace_broker.queue.request_search import is_known

        check_request_id(request_id)
        with unavailable(self.settings, "look for a request"):
            try:
                queues = self._known_queues()
                return is_known(self._redis, request_id, queues, self._servers.of, streams=self._streams)
            except redis.exceptions.NoPermissionError:
                return None

    def status(self, request_id: str) -> RequestStatus:
        """Return the state of the request and its number of tokens, or rows, so far.

        Raises StreamServerUnavailableError if a server that may have the stream is away, and no other has it.
        """
        check_request_id(request_id)
        with unavailable(self.settings, "read the status of a request"):
            homes = self._streams.homes_now(request_id)
            found = self._statuses(homes, request_id, "read the status of a request", first=True)
            return read_status(next(iter(found.values()), None))

    def _statuses(self, homes: Sequence[str], request_id: str, action: str, *, first: bool = False) -> dict[str, Any]:
        """Return the replies of the servers that have the stream, by home."""

        def ask(home: str, server: redis.Redis) -> Any:
            return STREAM_STATUS.bound(server)(stream=stream_key(id_in_keys(home, request_id)))

        return ask_homes(self._streams, homes, ask, action, first=first)

    def models(self) -> dict[str, RegisteredModel]:
        """Return every model that was ever served, by served name."""
        with unavailable(self.settings, "read the models"):
            return known_models(self._redis)

    def loading_models(self) -> dict[str, LoadingModel]:
        """Return the models that workers are loading now, by served name. Another worker may serve one meanwhile.

        Returns none if the Redis user may not read them, as `client` and `producer` of deploy/redis/users.acl.
        """
        from headrace_broker.models.loading_models import loading_models

        with unavailable(self.settings, "read the models"):
            return loading_models(self._redis)

    def queue_levels(self, models: Iterable[str]) -> dict[str, QueueLevels]:
        """Return how many messages of each model's queue are ready, leased and dead; see `QueueLevelReader`.

        If the server of a queue is away, all its numbers are 0 and its `problem` says so.
        """
        names = [require_model(model) for model in models]
        with unavailable(self.settings, "read the queue levels"), self._levels_lock:
            levels = self._levels.read_reachable(map(queue_name, names), self._redis)
            return {name: levels[queue_name(name)] for name in names}

    def queue_tenants(self, models: Iterable[str]) -> dict[str, dict[str, int]]:
        """Count waiting messages by model and tenant; '' stands for no tenant.

        Messages that no worker has moved from the producer's list to their tenant's sorted set are not counted.
        """
        from headrace_broker.queue.levels import read_tenants

        names = [require_model(model) for model in models]
        with unavailable(self.settings, "read the queue levels"):
            return {name: read_tenants(self._servers.of(queue_name(name)), queue_name(name)) for name in names}

    def dead_letters(self, limit: int = 1000, *, on_away: Callable[[str], object] | None = None) -> list[DeadLetter]:
        """Return up to `limit` dead letters, which no worker gets again, the newest first.

        They are those of all models that were ever served, and of the client's own model.

        Args:
            on_away: called with a message for each server of queues that is away. Its dead letters are missing then.
                Without it, QueueUnavailableError is raised.
        """
        from headrace_broker.queue.dead_letters import dead_letters

        check_limit(limit)
        found = []
        with unavailable(self.settings, "read the dead letters"):
            for server, queues in self._servers.by_server(self._known_queues()):
                try:
                    found += [letter for queue in queues for letter in dead_letters(server, queue, limit)]
                except CONNECTION_ERRORS as error:
                    if on_away is None or server is self._redis:
                        raise
                    on_away(f"without those of {', '.join(queues)}: {address_of(server)} is away ({error})")
        return sorted(found, key=lambda letter: letter.at or 0.0, reverse=True)[:limit]

    def requeue_dead_letters(self, letters: Iterable[DeadLetter]) -> list[DeadLetter]:
        """Send these messages again under their old ids, delete their streams and results, and return those sent.

        The others are no longer stored, or cannot be requeued: `queue/dead_letters.py` says why.
        """
        from headrace_broker.queue.dead_letters import DeadLetter, requeue

        with unavailable(self.settings, "requeue dead letters"):
            checked = check_all("letters", letters, DeadLetter)
            return requeue(self._redis, checked, self._servers.of, streams=self._streams)

    def purge_dead_letters(self, letters: Iterable[DeadLetter]) -> int:
        """Delete these dead letters for good and return how many still existed."""
        from headrace_broker.queue.dead_letters import DeadLetter, purge

        with unavailable(self.settings, "purge dead letters"):
            return purge(self._servers.of, check_all("letters", letters, DeadLetter))

    def purge_queue(self, model: str | None = None) -> PurgedMessages:
        """Cancel every request that waits in the model's queue and return how many. Running requests continue.

        The stream and the result of each cancelled request say that it was cancelled.
        """
        from headrace_broker.queue.purge import purge_queue

        model = require_model(self._model if model is None else model)
        queue, ttl_seconds = queue_name(model), self.settings.result_ttl_seconds
        with unavailable(self.settings, "purge a queue"):
            return purge_queue(self._servers.of(queue), queue, ttl_seconds=ttl_seconds, streams=self._streams)

    def _known_queues(self) -> list[str]:
        """Return the queues of all models that were ever served, and of the client's own model."""
        models = [*known_models(self._redis), *([self._model] if self._model else [])]
        return [queue_name(model) for model in dict.fromkeys(models)]

    def _submit(self, submissions: Sequence[Submission], *, batch_size: int = 0) -> list[str]:
        self._require_served(submissions)
        request_ids, to_send = self._idempotency.bind(submissions, self._used_ids(submissions))
        self._require_room(to_send)
        self._start_heartbeats(to_send)
        self._message_sender().send(to_send, batch_size=batch_size)
        self._idempotency.mark_sent(to_send)
        return request_ids

    def _message_sender(self) -> MessageSender:
        with self._sender_lock:
            if self._sender is None:
                from headrace_broker.client.message_sender import MessageSender  # imports Celery

                self._sender = MessageSender(self.settings, self.tracing)
            return self._sender

    def _require_served(self, submissions: Iterable[Submission]) -> None:
        asked = {submission.model for submission in submissions}
        if not self._check_model or asked <= self._served:
            return
        known = known_models(self._redis).keys()
        if known and (unknown := sorted(asked - known)):
            raise UnknownModelError(unknown[0], known)
        self._served.update(known)

    def _used_ids(self, submissions: Iterable[Submission]) -> set[str]:
        """Return the caller-chosen ids that have a stream, an `ended` key or a result that this client may read.

        A request that still waits in the queue has none of these. A worker drops a second message with its id, or makes
        it a dead letter.
        """
        given = [submission.request_id for submission in submissions if submission.has_given_id]
        if not given:
            return set()
        used: set[str] = set()
        for home, request_ids in {**self._streams.by_home(given), MAIN: given}.items():
            with unless_away(home), self._streams.of(home).pipeline(transaction=False) as pipe:  # a worker checks, too
                for name in (id_in_keys(home, request_id) for request_id in request_ids):
                    pipe.exists(stream_key(name), ended_key(name), result_key(name))
                counts = zip(request_ids, pipe.execute(raise_on_error=False), strict=True)
                used.update(request_id for request_id, count in counts if isinstance(count, int) and count)
        return used

    def _require_room(self, submissions: Sequence[Submission]) -> None:
        """Raise QueueFullError if the submissions exceed a limit. Concurrent clients can together exceed it."""
        limit, quota = self.settings.max_queued_requests, self.settings.max_queued_requests_per_tenant
        if not limit and not quota:
            return
        from headrace_broker.queue.levels import read_backlog, read_tenant_level, retry_after

        if limit:
            for model, count in Counter(submission.model for submission in submissions).items():
                backlog = read_backlog(self._servers.of(queue_name(model)), queue_name(model))
                if (excess := backlog.num_queued + count - limit) > 0:
                    raise QueueFullError(model, backlog.num_queued, limit, retry_after(backlog, excess))
        if quota:
            tenants = Counter((submission.model, submission.headers.get("tenant", "")) for submission in submissions)
            for (model, tenant), count in tenants.items():
                queue = queue_name(model)
                server = self._servers.of(queue)
                level = read_tenant_level(server, queue, tenant, of_interest=quota - count + 1)
                if (excess := level.num_queued + count - quota) > 0:
                    raise TenantQueueFullError(model, tenant, level.num_queued, quota, retry_after(level, excess))

    def _start_heartbeats(self, submissions: Iterable[Submission]) -> None:
        by_home: dict[str, list[Submission]] = defaultdict(list)
        for submission in submissions:
            if "abandon_after" in submission.headers:
                by_home[self._streams.homes(submission.request_id)[0]].append(submission)
        for home, wanted in by_home.items():
            with unless_away(home), self._streams.of(home).pipeline(transaction=False) as pipe:
                for submission in wanted:
                    name = id_in_keys(home, submission.request_id)
                    start_heartbeats(pipe, name, submission.headers["abandon_after"])
                    send_heartbeat(pipe, name)  # the key exists already if the request is sent again
                pipe.execute()
