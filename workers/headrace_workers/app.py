"""The worker's Celery application, configured by the environment: `celery -A headrace_workers.app worker`."""

import logging
import os
import sys
from typing import Any, Final

from celery import Celery
from celery.signals import celeryd_after_setup, setup_logging

import headrace_workers.celery.commands  # noqa: F401  # registers Celery's commands
from headrace_broker.app import make_app
from headrace_broker.keys import queue_name
from headrace_broker.settings import BrokerSettings
from headrace_monitoring.logging import configure_logging
from headrace_workers.celery.bootsteps import EngineConsumerStep, EngineStep
from headrace_workers.celery.connection import WorkerAMQP
from headrace_workers.celery.control_messages import WorkerControl
from headrace_workers.celery.result_backend import BACKENDS
from headrace_workers.celery.task import TASKS
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.settings import WorkerSettings

CELERY_OPTIONS: Final = ("--without-gossip", "--without-mingle", "--heartbeat-interval", "10")
"""Of Celery's worker: other Celery workers do not concern it, and each heartbeat of an idle worker wakes Redis."""


def create_app(settings: WorkerSettings) -> Celery:
    """Return a Celery application whose worker serves one model.

    Raises:
        WorkerSettingsError: the broker's settings are invalid.
    """
    broker = settings.broker()
    _check_callback_servers(settings, broker)
    app = make_app(broker, worker=True, models=settings.served_names)
    app.amqp_cls = WorkerAMQP
    app.control_cls = WorkerControl
    app.loader.override_backends = BACKENDS
    # The engine is this process's child: a forking pool would break it, and tasks take no slot of the pool anyway.
    app.conf.update(worker_pool="solo", worker_concurrency=1, worker_enable_remote_control=True)
    app.conf.worker_disable_rate_limits = True  # a limit would hold leased messages in Celery's own queue
    app.conf.worker_consumer = "headrace_workers.celery.consumer:EngineConsumer"
    for task in TASKS:
        app.register_task(task(settings))
    # Celery's own tasks run and publish anything that their arguments name, with this worker's rights, on its thread.
    for name in [name for name in app.tasks if name.startswith("celery.")]:
        app.tasks.unregister(name)
    app.steps["worker"].add(EngineStep)
    app.steps["consumer"].add(EngineConsumerStep)

    def configure(*, logfile: str | None = None, colorize: bool | None = None, **_: Any) -> None:
        # the arguments come from Celery's --logfile and --no-color
        if configure_logging(settings.log_level, settings.log_json, file=logfile, colours=colorize is not False):
            # Celery writes its banner and "Warm shutdown" to it, not to the log. Python allows the value None.
            sys.__stdout__ = None  # type: ignore[misc]
        logging.getLogger("celery.app.trace").setLevel(logging.WARNING)  # it repeats our log line of each request
        # transformers warns on stderr, outside the log, if torch is missing; a worker of another engine needs no torch
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    def configure_banner(instance: Any, **_: Any) -> None:
        instance.quiet = instance.quiet or sys.__stdout__ is None

    setup_logging.connect(configure, weak=False)
    celeryd_after_setup.connect(configure_banner, weak=False)
    return app


def _check_callback_servers(settings: WorkerSettings, broker: BrokerSettings) -> None:
    """Raise WorkerSettingsError if callbacks would go to a queue on a server of its own, or come from one.

    They are written by the script that settles the message, to that message's server. Results are on the main one.
    """
    rules = settings.callback_rules
    queues = {*rules.queues, *map(queue_name, settings.served_names)} if rules.tasks else set()
    if apart := sorted(queues & broker.url_by_queue.keys()):
        raise WorkerSettingsError(
            f"HEADRACE_CALLBACK_TASKS must be empty, as HEADRACE_QUEUE_URLS has another server for {', '.join(apart)}"
        )


def __getattr__(name: str) -> Any:
    """Make `app` from the environment when Celery's command line asks for it, not when this module is imported."""
    if name in ("app", "celery"):
        try:
            globals()[name] = create_app(WorkerSettings.from_env())
        except WorkerSettingsError as error:
            sys.exit(f"headrace: {error}")  # Celery's command would print a traceback instead
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
