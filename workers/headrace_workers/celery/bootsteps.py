"""Runs the engine inside a Celery worker, with two bootsteps.

The worker's step owns the engine, the dispatcher and the metrics server, which live as long as the process. The
consumer's step runs again at each reconnect and attaches them to the new connection and its event loop.
"""

import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import redis
from celery import bootsteps
from celery.worker import state as worker_state

from headrace_broker.client.tokenizer_calls import TokenizerCalls
from headrace_broker.keys import queue_name
from headrace_broker.messages import TASK_NAME, TASK_NAMES
from headrace_broker.models.registry import REGISTER_SECONDS
from headrace_broker.queue.unread_lists import gather_steps, lists_on_main, remedy, separated_lists
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS, address_of, connect
from headrace_broker.server.eviction import eviction_warning
from headrace_broker.server.queue_servers import OTHER_TIMEOUT, QueueServers
from headrace_broker.server.restart_safety import restart_safety
from headrace_broker.server.rights import refused_lists
from headrace_broker.server.stream_servers import StreamServers
from headrace_engine.options.config import OWN_ENGINE, EngineConfig
from headrace_monitoring.health import HealthServer, WorkerHealth
from headrace_monitoring.labels import LabelSets
from headrace_monitoring.logging import frames, process_fields
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.tracing import make_tracer_provider
from headrace_workers.celery.callbacks import Callbacks
from headrace_workers.celery.pod_deletion_cost import INTERVAL_SECONDS, PodDeletionCost
from headrace_workers.celery.queue_gauges import POLL_SECONDS, QueueGauges
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.engine_link.supervisor import EngineSupervisor
from headrace_workers.long_lived_objects import exempt_long_lived_objects
from headrace_workers.preparation.answer_formats import AnswerFormats
from headrace_workers.preparation.preparer_process import PreparerProcess
from headrace_workers.preparation.tokenizer_service import TokenizerService
from headrace_workers.requests.dispatcher import HEARTBEAT_SECONDS, Dispatcher
from headrace_workers.requests.preemption import Preemption
from headrace_workers.requests.service_state import ServedModel
from headrace_workers.requests.stream_homes import STREAM_TIMEOUT
from headrace_workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

LOADING_REPORT_SECONDS = 2.0
SORT_SECONDS = 1.0
"""Seconds between two sorts by a worker without free slots. A sort moves new messages from the producers' lists to the
sorted sets of their tenants, and records when they began to wait."""
_UNREAD_LISTS_SECONDS = 10.0
"""Seconds between two searches for lists that no worker reads."""
_EXIT_ENGINE_GIVEN_UP = 1
_LAST_RESULTS_SECONDS = 5.0
_FAILED_TURN_SECONDS = 0.05


class EngineStep(bootsteps.StartStopStep):
    """Starts and stops the engine; a step of the worker's blueprint. Available as `GenerateTask.step`."""

    requires = ("celery.worker.components:Hub", "celery.worker.components:Pool")

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._task = worker.app.tasks[TASK_NAME]
        for name in TASK_NAMES:
            worker.app.tasks[name].step = self

    def create(self, worker: Any) -> "EngineStep":
        settings = self._task.settings
        broker, config, adapters = settings.broker(), settings.engine_config(), settings.adapters()
        self._name: str = worker.hostname or socket.gethostname()
        process_fields.set(worker=self._name)
        self._grace_seconds: float = settings.grace_seconds
        self.metrics = _make_metrics(settings, config, adapters)
        self._health = WorkerHealth(step_timeout=settings.step_timeout())
        self._server = HealthServer(
            exposition=self.metrics.exposition,
            not_ready=self._health.not_ready,
            not_alive=self._health.not_alive,
            host=settings.metrics_host,
            port=settings.metrics_port,
        )
        self._tracer_provider = (
            make_tracer_provider("headrace-worker", version("headrace"), self._name) if settings.tracing else None
        )
        self.queues = [queue_name(name) for name in settings.served_names]
        """The queues that the worker was started with."""
        self._cancelled: set[str] = set()
        self._reported: set[str] = set()
        """Lists that no worker reads, if the log has reported them."""
        self.client = connect(broker.redis_url)
        served = {queue: url for queue, url in broker.url_by_queue.items() if queue in self.queues}
        self.servers = QueueServers(self.client, served, timeout=OTHER_TIMEOUT)
        self._streams = StreamServers.connected(self.client, *broker.stream_servers, timeout=STREAM_TIMEOUT)
        self._gauges = QueueGauges(self.servers.of, self.queues, self.metrics, self._health)
        self.dispatcher = self._make_dispatcher(worker, settings, config, adapters, broker.result_ttl_seconds)
        self._supervisor = self.dispatcher.engine.supervisor
        self.callbacks = Callbacks(worker.app, settings.callback_rules)
        self._deletion_cost = PodDeletionCost.of_this_pod() if settings.pod_deletion_cost else None
        self._tokenizer_service = TokenizerService(
            TokenizerCalls(self.client, settings.served_names),
            self.dispatcher.admission.answer_call,
            lambda: self.dispatcher.admission.answers_calls,
        )
        self._channel: Any = None
        self._leases: WorkerLeases | None = None
        self._grace_ends_at = math.inf
        """Monotonic time at which the grace period of a drain command ends."""
        return self

    def _make_dispatcher(
        self, worker: Any, settings: WorkerSettings, config: EngineConfig, adapters: Adapters, stream_ttl_seconds: int
    ) -> Dispatcher:
        max_num_seqs = config.scheduler.max_num_seqs
        model = ServedModel(
            names=settings.served_names,
            adapters=adapters,
            max_num_seqs=max_num_seqs,
            fetch_quantum=settings.fetch_quantum,
            max_delay_seconds=settings.max_delay_seconds,
            preparation_settings={
                "model": config.model.model,
                "trust_remote_code": config.model.trust_remote_code,
                "logits_processors": list(config.model.logits_processors),
            },
            engine=config.engine,
            share_prefix_cache=settings.share_prefix_cache or not settings.enable_prefix_caching,
            answer_formats=AnswerFormats(settings.tool_parser, settings.reasoning_parser),
            callback_rules=settings.callback_rules,
        )
        return Dispatcher(
            model,
            client=self.client,
            stream_ttl_seconds=stream_ttl_seconds,
            worker_name=self._name,
            supervise=partial(EngineSupervisor, config, stall_seconds=settings.stall_limit()),
            make_process=PreparerProcess,
            preemption=Preemption(
                settings.max_preemptions, max_num_seqs, self.metrics, wait_seconds=settings.preemption_wait_seconds
            ),
            metrics=self.metrics,
            health=self._health,
            store_result=lambda request_id, result, content_type: worker.app.backend.store_result(
                request_id, result, "SUCCESS", content_type=content_type
            ),
            on_refused=self._gauges.refused,
            on_given_up=self._stop_worker,
            publish_interval=settings.publish_interval,
            tracer_provider=self._tracer_provider,
            streams=self._streams,
            call_back_dead=lambda letter: self.callbacks.send_dead(self.servers.of(letter.queue), letter),
        )

    def start(self, worker: Any) -> None:
        self._server.start()
        logger.info("metrics on %s/metrics, health on %s/health/ready", self._server.url, self._server.url)
        self._supervisor.start()
        self.dispatcher.start()
        self._tokenizer_service.start()
        exempt_long_lived_objects()
        hub = worker.hub
        hub.call_repeatedly(HEARTBEAT_SECONDS, self.dispatcher.heartbeat)
        hub.call_repeatedly(HEARTBEAT_SECONDS, worker.consumer.flush_events)
        hub.call_repeatedly(HEARTBEAT_SECONDS, self._end_if_drained)
        hub.call_repeatedly(REGISTER_SECONDS, self._register)
        hub.call_repeatedly(LOADING_REPORT_SECONDS, self.dispatcher.engine.report_loading)
        hub.call_repeatedly(POLL_SECONDS, self._gauges.poll)
        if self._deletion_cost is not None:
            self._deletion_cost.start()
            hub.call_repeatedly(INTERVAL_SECONDS, self._update_deletion_cost, self._deletion_cost)
        hub.call_repeatedly(SORT_SECONDS, self._sort)
        hub.call_repeatedly(SORT_SECONDS, self._gather_steps)
        hub.call_repeatedly(_UNREAD_LISTS_SECONDS, self._report_unread_lists)

    def run_while_disconnected(self, seconds: float, problem: str | None = None) -> None:
        """Serve the engine for `seconds` while Celery waits for Redis and does not run its event loop.

        `problem` says why Celery has no connection.
        """
        if problem is not None:
            self._gauges.refused(problem)
        self.dispatcher.loop_watch.pause()
        self.dispatcher.heartbeat()
        self._supervisor.pump(seconds)

    def attach(self, consumer: Any, hub: Any) -> None:
        """Attach the engine to a new connection."""
        channel = consumer.task_consumer.channel
        channel.serve(self.dispatcher.admission)
        self._channel, self._leases = channel, channel.leases
        self.dispatcher.admission.is_alone = channel.leases.is_alone
        self._gauges.attach(channel.leases)
        for lease_id, message in self._leases.held().items():
            # When Celery loses its connection, it forgets the messages that have not started.
            if message.headers.get("id") not in worker_state.requests:
                self._leases.requeue(lease_id)
        self.dispatcher.attach(hub)
        self._supervisor.attach(hub)
        self._tokenizer_service.attach(hub)
        self.dispatcher.homes.refresh(is_reconnected=True)  # before the first fetch
        self._check_server()

    def _check_server(self) -> None:
        """Check whether Redis may lose messages, at each connection, as a failover may lead to another server."""
        leases = self._leases
        away = {self.servers.of(queue) for queue in self.queues if leases is not None and leases.away(queue)}
        homes = self.dispatcher.homes
        self._check_callback_queues()
        streams: list[redis.Redis] = []
        for name in {*homes.servers.names} - homes.away():
            try:
                streams += homes.servers.nodes(name).values()
            except REDIS_ERRORS as error:
                logger.warning("the stream server %s could not be read: %s", name, error)
        for client in [*self.servers, *streams]:
            if client in away:
                continue
            try:
                info = client.info()
                warnings = (eviction_warning(info), *restart_safety(client, info).warnings)
            except REDIS_ERRORS as error:  # the user may not run INFO, or Redis is unavailable again
                logger.warning("Redis's settings could not be read at %s: %s", address_of(client), error)
                continue
            for warning in filter(None, warnings):
                logger.warning("%s", warning)

    def _check_callback_queues(self) -> None:
        """Warn if callbacks are permitted and cannot be sent."""
        rules = self._task.settings.callback_rules
        try:
            refused = refused_lists(self.client, rules.queues) if rules.tasks else []
        except REDIS_ERRORS:  # Redis is unavailable again
            return
        if refused:
            logger.warning("callbacks cannot be sent: the user of Redis may not run LPUSH on %s", ", ".join(refused))

    def stats(self) -> dict[str, Any]:
        """Return the dispatcher's figures and the number of leases, for operators."""
        held = len(self._leases) if self._leases is not None else 0
        return {**self.dispatcher.stats(), "leases": held}

    def stop_consuming(self, consumer: Any, queue: str) -> None:
        """Take no more messages from one of the worker's queues. Without a queue the worker is not ready."""
        if queue not in self._cancelled:
            self._cancelled.add(queue)
            consumer.call_soon(consumer.cancel_task_queue, queue)
        if len(self._cancelled) == len(self.queues):
            self.dispatcher.pause()

    def consume(self, consumer: Any, queue: str) -> bool:
        """Undo `stop_consuming`. Returns False if the worker drains for good."""
        if self.dispatcher.is_draining:
            return False
        if queue in self._cancelled:
            if len(self._cancelled) == len(self.queues):
                self.dispatcher.resume()
            self._cancelled.remove(queue)
            consumer.call_soon(consumer.add_task_queue, queue)
        return True

    def drain_and_end(self, grace_seconds: float | None) -> None:
        """Take no messages, and stop the worker when it is idle or the grace period is over."""
        self.dispatcher.drain("command")
        if grace_seconds is not None:
            self._grace_ends_at = time.monotonic() + grace_seconds

    def _end_if_drained(self) -> None:
        grace_is_over = time.monotonic() >= self._grace_ends_at
        if self.dispatcher.is_draining and (self.dispatcher.is_idle or grace_is_over):
            if grace_is_over:
                self._grace_seconds = 0.0
            worker_state.should_stop = worker_state.should_stop or 0

    def stop(self, worker: Any) -> None:
        """Shut down warm: run the event loop until all requests have ended or the grace period is over."""
        self.dispatcher.drain("warm shutdown")
        deadline = time.monotonic() + self._grace_seconds
        while not self.dispatcher.is_idle and self._supervisor.is_ready and time.monotonic() < deadline:
            self._turn_loop(worker)  # renews leases, publishes, acknowledges
        self._end(worker)

    def terminate(self, worker: Any) -> None:
        """Shut down cold: requeue all requests now."""
        self.dispatcher.drain("cold shutdown")
        self._end(worker)

    def _end(self, worker: Any) -> None:
        self.dispatcher.requeue_all()
        deadline = time.monotonic() + _LAST_RESULTS_SECONDS
        while not self.dispatcher.is_idle and time.monotonic() < deadline:
            self._turn_loop(worker)
        for _ in range(3):  # the last acknowledgements wait for the loop's next turns
            worker.hub.call_soon(worker.consumer.flush_events)
            self._turn_loop(worker)
        if self._leases is not None:
            for lease_id in reversed(self._leases.held()):  # not settled yet
                self._leases.requeue(lease_id)
        self.dispatcher.log_drained()
        self._supervisor.stop()
        self._tokenizer_service.stop()
        if self._deletion_cost is not None:
            self._deletion_cost.stop()
        self.dispatcher.stop()
        if self._tracer_provider is not None:
            self._tracer_provider.shutdown()
        self._server.stop()

    def _turn_loop(self, worker: Any) -> None:
        """Run one turn of the event loop. An error of a callback must not stop it before all messages are settled."""
        worker.hub.call_soon(lambda: None)  # with a scheduled call, the event loop does not wait for input
        try:
            worker.hub.run_once()
        except Exception as error:  # noqa: BLE001  # the drain continues in any case
            logger.error("the event loop failed while the worker drained: %s", frames(error))
            time.sleep(_FAILED_TURN_SECONDS)

    def _gather_steps(self) -> None:
        """Move messages of Celery's ten priority_steps to the lists that workers read."""
        self._for_each_reaped(lambda queue, server: gather_steps(server, [queue]))

    def _report_unread_lists(self) -> None:
        """Report each list of messages that no worker reads, once."""
        self._for_each_reaped(self._report_unread_lists_of)

    def _report_unread_lists_of(self, queue: str, server: redis.Redis) -> None:
        on_main = {} if server is self.client else lists_on_main(self.client, queue)
        for name in on_main.keys() - self._reported:
            text = "no worker reads the list %r, which has %d message(s) of queue %s: %s"
            logger.warning(text, name, on_main[name], queue, remedy(queue, name))
        self._reported |= on_main.keys()
        for name in set(separated_lists(server, [queue])) - self._reported:
            self._reported.add(name)
            logger.warning("no worker reads the list %r: leave the option sep of its producers unset", name)

    def _for_each_reaped(self, do: Callable[[str, redis.Redis], object]) -> None:
        """Call `do` with each queue of which this worker is the reaper, and its server. A queue has one reaper."""
        if self._leases is None:
            return
        for queue in self._leases.reaped:
            if self._leases.away(queue):
                continue
            try:
                do(queue, self.servers.of(queue))
            except REDIS_ERRORS as error:
                problem = self._leases.failed(queue, error)
                logger.debug("a periodic task of the queue's reaper failed: %s", problem)

    def _sort(self) -> None:
        if (
            self._leases is None or self.dispatcher.admission.free_slots() > 0
        ):  # with free slots, each fetch sorts new messages first
            return
        try:
            self._leases.sort(self.queues)
            self._channel.schedule_preempting_fetch()  # a little later, because other workers may have free slots
        except CONNECTION_ERRORS:
            pass  # the event loop notices the loss itself
        except redis.ResponseError as error:
            self._gauges.refused(str(error))

    def _update_deletion_cost(self, deletion_cost: PodDeletionCost) -> None:
        deletion_cost.update(self.dispatcher.engine.in_flight.num_tokens_held)

    def _register(self) -> None:
        if self._supervisor.is_ready:
            self.dispatcher.engine.register_model()

    def _stop_worker(self, reason: str) -> None:
        logger.critical("the worker stops: %s", reason)
        worker_state.should_stop = _EXIT_ENGINE_GIVEN_UP


class EngineConsumerStep(bootsteps.StartStopStep):
    """Attaches the engine to a connection; a step of the consumer's blueprint, which runs at each reconnect."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        consumer.app.tasks[TASK_NAME].step.attach(consumer, hub)


def _make_metrics(settings: WorkerSettings, config: EngineConfig, adapters: Adapters) -> Metrics:
    metrics = Metrics(
        model=settings.served_name,
        queue=queue_name(settings.served_name),
        version=version("headrace"),
        stall_limit=settings.stall_limit(),
        label_sets=LabelSets(tenants=settings.tenant_names, adapters=adapters.names),
    )
    if config.engine != OWN_ENGINE:  # its step statistics are known when it is ready
        metrics.steps_report_only(())
    metrics.show_kinds(generates=False, pools=False)  # known when the model is loaded
    return metrics
