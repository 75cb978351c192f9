"""`headrace worker`: set the environment variables of the given flags, then run Celery's worker."""

import os
import socket
import sys
from typing import Any

import click

from headrace_cli.commands.options import given, setting_flags
from headrace_workers.settings import QUEUE_SETTINGS, SETTINGS, WorkerSettings


@click.command()
@setting_flags(QUEUE_SETTINGS)
@setting_flags(SETTINGS)
@click.option("--drain", is_flag=True, help="Drain the running workers, and start none.")
@click.option(
    "--worker", "workers", multiple=True, metavar="NAME", help="With --drain: only this worker; may be repeated."
)
def worker(drain: bool, workers: tuple[str, ...], **flags: Any) -> None:
    """Serve a model: take requests from its queue, generate, and stream the answers.

    Every flag can also be set as an environment variable HEADRACE_<FLAG>, e.g. HEADRACE_REDIS_URL. On SIGTERM running
    requests may finish within the grace time, and the rest return to the queue; on SIGQUIT all return at once. With
    --drain it starts no worker, and does the same as `headrace control drain`.

    \b
    Example:
        headrace worker --model smollm2-135m-instruct --redis-url redis://127.0.0.1:6379/0
    """
    if drain:
        _drain(workers, flags)
        return
    if workers:
        raise click.UsageError("--worker is only for --drain")
    for name, value in given(flags).items():
        os.environ[f"HEADRACE_{name.upper()}"] = str(value)
    from celery.signals import worker_shutdown

    from headrace_monitoring.logging import configure_logging, takes_colours
    from headrace_workers.app import CELERY_OPTIONS, create_app

    settings = WorkerSettings.from_env()
    configure_logging(settings.log_level, settings.log_json)  # Celery would do it after its first warnings
    settings.engine_config()  # raises here if an option is invalid, or if the model cannot be fetched
    app = create_app(settings)
    name = f"headrace-{settings.served_name}-{os.getpid()}@{socket.gethostname()}"
    exit_codes: list[int] = []  # Celery's command drops the exit code when it is called as a function

    @worker_shutdown.connect(weak=False)
    def keep_exit_code(sender: Any, **_: Any) -> None:
        exit_codes.append(sender.exitcode or 0)

    plain = [] if takes_colours(sys.stdout) else ["--no-color"]  # Celery's banner looks at stderr instead
    app.worker_main([*plain, "worker", *CELERY_OPTIONS, "--hostname", name, "--loglevel", "INFO"])
    sys.exit(max(exit_codes, default=1))


def _drain(workers: tuple[str, ...], flags: dict[str, Any]) -> None:
    from headrace_broker.settings import BrokerSettings
    from headrace_cli.commands.control import ANSWER_SECONDS, tell_workers

    others = given(flags)
    redis_url, grace_seconds = others.pop("redis_url", None), others.pop("grace_seconds", None)
    if others:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise click.UsageError(f"{names}: not for --drain, which starts no worker")
    settings = BrokerSettings.from_env(os.environ) if redis_url is None else BrokerSettings(redis_url=redis_url)
    tell_workers(settings, "drain", workers, ANSWER_SECONDS, {"grace_seconds": grace_seconds})
