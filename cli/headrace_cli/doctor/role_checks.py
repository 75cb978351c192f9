"""Runs the checks of a role. Imports what a role needs only for that role."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from headrace_broker.errors import SettingsError
from headrace_broker.server.users import USERS
from headrace_broker.settings import BrokerSettings
from headrace_cli.doctor.finding import Finding, sentence
from headrace_cli.doctor.machine_checks import check_disk, check_port
from headrace_cli.doctor.redis_checks import check_other_servers, check_redis

Environ = Mapping[str, str]

ROLES: Final = {user.name: user for user in USERS if user.name not in ("default", "admin", "operator")}
"""The roles, by the names of their users in deploy/redis/users.acl."""
_SETTINGS_REMEDY: Final = "correct the setting (docs/reference/settings.md)"


def findings(role: str | None, environ: Environ) -> Iterator[Finding]:
    """Yield the findings for a process that has these environment variables.

    `role` is one of `ROLES`. None means the role of the URL's user, or else worker.
    """
    try:
        settings = BrokerSettings.from_env(environ)
    except SettingsError as error:
        yield Finding("settings", "failed", sentence(error), _SETTINGS_REMEDY)
        return
    username = settings.server.username
    name = role or (username if username in ROLES else "worker")
    yield from check_redis(settings, ROLES[name])
    yield from check_other_servers(settings, ROLES[name])
    if name not in _MACHINE_CHECKS:
        return
    own = _MACHINE_CHECKS[name]
    try:
        yield from own.run(environ)
    except ModuleNotFoundError as error:
        text = f"The role {name} needs the module {error.name}, which is not installed."
        yield Finding("packages", "failed", text, f"pip install 'headrace[{own.extra}]'")


def _check_worker(environ: Environ) -> Iterator[Finding]:
    from headrace_cli.doctor.worker_checks import check_worker  # imports torch

    yield from check_worker(environ)


def _check_gateway(environ: Environ) -> Iterator[Finding]:
    from headrace_gateway import GatewaySettings, GatewaySettingsError

    try:
        settings = GatewaySettings.from_env(environ)
    except GatewaySettingsError as error:
        yield Finding("settings", "failed", sentence(error), _SETTINGS_REMEDY)
        return
    yield check_port(settings.host, settings.port, "--port")
    if settings.metrics_port is not None:
        yield check_port(settings.metrics_host, settings.metrics_port, "--metrics-port")
    if settings.files is not None:
        yield check_disk(settings.files, "uploads and batches")


def _check_exporter(environ: Environ) -> Iterator[Finding]:
    from headrace_cli.exporter import ExporterSettings
    from headrace_workers.errors import WorkerSettingsError

    try:
        settings = ExporterSettings.from_env(environ)
    except WorkerSettingsError as error:
        yield Finding("settings", "failed", sentence(error), _SETTINGS_REMEDY)
        return
    yield check_port(settings.host, settings.port, "--port")


@dataclass(frozen=True, slots=True)
class _MachineChecks:
    run: Callable[[Environ], Iterator[Finding]]
    extra: str


_MACHINE_CHECKS: Final = {
    "worker": _MachineChecks(_check_worker, "worker"),
    "gateway": _MachineChecks(_check_gateway, "gateway"),
    "exporter": _MachineChecks(_check_exporter, "worker"),
}
