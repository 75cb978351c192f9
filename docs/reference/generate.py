"""Write docs/reference and docs/openapi.json from the code: `python docs/reference/generate.py [--check]`.

Settings, commands, metrics, errors, Redis keys and sampling parameters are declared in the packages. These pages list
them, so they are never edited by hand. With --check nothing is written: the exit status is 1 if a page is stale.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace_broker.key_schema import KeySchema
from headrace_broker.keys import KEYS
from headrace_broker.settings import BrokerSettings
from headrace_cli.exporter import EXPORTER_PREFIX, ExporterSettings
from headrace_cli.main import _headrace
from headrace_engine.requests.sampling_params import RepetitionDetectionParams, SamplingParams
from headrace_engine.requests.structured_outputs_params import StructuredOutputsParams
from headrace_gateway.http.broker_errors import api_error_of_end
from headrace_gateway.openapi.document import text as openapi_text
from headrace_gateway.redis import keys as redis_keys
from headrace_gateway.settings import GATEWAY_PREFIX, GatewaySettings
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.redis_levels import RedisLevels
from headrace_monitoring.service_levels import ModelLevels, ServiceExposition, ServiceLevels
from headrace_wire.codes import ErrorCode, GatewayCode
from headrace_wire.environment import variable_of
from headrace_wire.option import Option, options_of
from headrace_workers.settings import SETTINGS

DOCS = Path(__file__).parents[1]
COMMAND = "make reference"
_ERROR_MODULES = {
    "headrace_wire": ("errors",),
    "headrace_broker": ("errors", "results"),
    "headrace_engine": ("errors",),
    "headrace_gateway": ("errors",),
    "headrace_workers": ("errors",),
    "headrace_cli": ("errors",),
    "headrace_monitoring": ("errors",),
}
_MOST_VALUES = 12
"""Of a label with more values, the page shows the first four and the last."""


def pages() -> dict[str, str]:
    """Return the text of each file, by its path in docs/."""
    return {
        "reference/settings.md": _page("Settings", _settings()),
        "reference/cli.md": _page("Commands", _cli()),
        "reference/metrics.md": _page("Metrics", _metrics()),
        "reference/errors.md": _page("Errors", _errors()),
        "reference/redis-keys.md": _page("Redis keys", _redis_keys()),
        "reference/sampling-params.md": _page("SamplingParams", _sampling_params()),
        "openapi.json": openapi_text(),
    }


def stale(docs: Path = DOCS) -> list[str]:
    """Return the files that differ from the code, as paths in docs/."""
    return [
        name
        for name, text in pages().items()
        if not (docs / name).is_file() or (docs / name).read_text(encoding="utf-8") != text
    ]


def _page(title: str, lines: Iterable[str]) -> str:
    head = f"<!-- Generated from the code by `{COMMAND}`. Do not edit. -->\n\n# {title}\n\n"
    return head + "\n".join(lines).rstrip() + "\n"


# -- settings


def _settings() -> Iterator[str]:
    yield "Every setting is an environment variable. Most are also flags of a command: `HEADRACE_MAX_NUM_SEQS` is"
    yield "`--max-num-seqs` of `headrace worker`. A flag wins over its variable. Times are in seconds. None: not set."
    commands = "`headrace worker` and `celery -A headrace_workers.app worker`"
    readers = (
        "clients, workers, the gateway and the exporter. `headrace worker` has all flags, the others read the variables"
    )
    yield from _table("Queue", readers, options_of(BrokerSettings), "worker")
    yield from _table("Worker", commands, SETTINGS, "worker")
    gateway = "`headrace gateway`, beside those of the queue"
    yield from _table("Gateway", gateway, options_of(GatewaySettings), "gateway", GATEWAY_PREFIX)
    yield from _table("Exporter", "`headrace exporter`", options_of(ExporterSettings), "exporter", EXPORTER_PREFIX)


def _table(
    title: str, readers: str, options: Iterable[Option], command: str, prefix: str = "HEADRACE"
) -> Iterator[str]:
    yield from ("", f"## {title}", "", f"Read by {readers}.", "")
    yield from ("| variable, flag | default | limits | meaning |", "|---|---|---|---|")
    flags = {flag.name: flag.opts[:1] for flag in _command(command).params}
    for option in options:
        default = "required" if option.name == "model" else _shown(option.default)
        names = [variable_of(option, prefix), *flags.get(option.name, [])]
        limits = (option.limits or "").removeprefix("must be ")
        yield _row("<br>".join(f"`{name}`" for name in names), default, limits, option.help)


def _defaults(kind: Any) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(kind):
        made = field.default_factory
        yield field.name, field.default if made is dataclasses.MISSING else made()


# -- commands


def _cli() -> Iterator[str]:
    yield "Each command prints this text for `--help`."
    yield "The exit status is 0 for success, 1 for an error and 2 for wrong usage."
    for names, command in _commands(["headrace"], _headrace):
        context = _context(names)
        context.command = command
        yield from ("", f"## {' '.join(names)}", "", "```text")
        yield command.get_help(context).rstrip()
        yield "```"


def _context(names: list[str]) -> click.Context:
    context = click.Context(_headrace, info_name=names[0], terminal_width=100, max_content_width=100)
    for name in names[1:]:
        context = click.Context(_headrace, info_name=name, parent=context, terminal_width=100, max_content_width=100)
    return context


def _commands(names: list[str], command: click.Command) -> Iterator[tuple[list[str], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        context = _context(names)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands([*names, name], found)


def _command(name: str) -> click.Command:
    command = _headrace.get_command(_context(["headrace"]), name)  # type: ignore[attr-defined]
    assert command is not None
    return command


# -- metrics


def _metrics() -> Iterator[str]:
    yield "What each process shows at `/metrics`. [Monitoring](../monitoring.md) says what the series mean and how"
    yield "many there are. Each process also has the `process_` metrics of prometheus_client."
    sources: tuple[tuple[str, str, Iterable[Collector]], ...] = (
        ("Worker", "`headrace worker`, port 9464.", [_worker_registry()]),
        ("Exporter", "`headrace exporter`, port 9465.", [_exporter_registry()]),
        ("Gateway", "`headrace gateway --metrics-port 9466`.", [GatewayMetrics().registry]),
    )
    for title, sentence, registries in sources:
        yield from ("", f"## {title}", "", sentence, "", "| metric | type | labels | help |", "|---|---|---|---|")
        families = [family for registry in registries for family in registry.collect()]
        for family in sorted(families, key=lambda family: family.name):
            if family.name.startswith("headrace_"):
                suffix = "_total" if family.type == "counter" else ""
                yield _row(f"`{family.name}{suffix}`", family.type, _labels(family), family.documentation)


def _worker_registry() -> Collector:
    return Metrics(model="MODEL", queue="headrace.MODEL", version="VERSION").registry


def _exporter_registry() -> Collector:
    exposition = ServiceExposition(version="VERSION", main="HOST:PORT")
    level = ModelLevels(
        model="MODEL",
        queue="headrace.MODEL",
        ready={},
        leased=0,
        run_out=0,
        unread=0,
        dead={},
        oldest_age_seconds=0.0,
        blocked=False,
        last_seen=0.0,
        used_requests=0,
        used_tokens=dict.fromkeys(("prompt", "cached", "generated"), 0),
        outstanding_tokens={"waiting": 0.0, "leased": 0.0},
        tokens_per_second=0.0,
        earliest_slack_seconds=0.0,
    )
    redis = RedisLevels(
        server="HOST:PORT",
        memory_used_bytes=0,
        memory_limit_bytes=0,
        connected_clients=0,
        persistence_ok=True,
        may_evict=False,
        evicted_keys=0,
        rejected_connections=0,
        started_at=0.0,
        loads_all=True,
        load_errors=0,
        messages_before_restart=0,
        messages_after_restart=0,
    )
    exposition.polled(ServiceLevels(models=[level], servers=[redis], away=()), 0.0)
    return exposition.registry


def _labels(family: Metric) -> str:
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name != "le" and value not in values.setdefault(name, []):
                values[name].append(value)
    shown = []
    for name, found in values.items():
        listed = [value for value in found if value not in ("", "MODEL", "headrace.MODEL", "VERSION")]
        listed.sort(key=lambda value: (int(value), "") if value.isdigit() else (0, value))
        if len(listed) > _MOST_VALUES:
            listed = [*listed[:4], "...", listed[-1]]
        shown.append(f"`{name}`" + (f": {', '.join(listed)}" if listed else ""))
    return "; ".join(shown)


# -- errors


def _errors() -> Iterator[str]:
    yield "## Codes of a request that failed"
    yield from (
        "",
        "The field `error.code` of a stream's end and of a result ([wire](../wire.md#result)), and the HTTP status",
    )
    yield from ("that the gateway answers with.", "", "| code | HTTP status | OpenAI's type |", "|---|---|---|")
    for code in ErrorCode:
        error = api_error_of_end(code, "")
        yield _row(f"`{code}`", str(error.status), f"`{error.kind}`")
    yield from ("", "## Codes of the gateway", "", "The field `error.code` of an HTTP error body, also a label of")
    yield from (
        "`headrace_gateway_refusals_total`. [Gateway](../gateway.md#errors-and-headers) says when to try again.",
        "",
    )
    yield ", ".join(f"`{code}`" for code in sorted((*ErrorCode, *GatewayCode))) + "."
    for package, modules in _ERROR_MODULES.items():
        yield from ("", f"## Exceptions of `{package}`", "", "| exception | is a | meaning |", "|---|---|---|")
        names = [f"{package}.{name}" for name in modules]
        for module, kind in ((name, kind) for name in names for kind in vars(importlib.import_module(name)).values()):
            if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module:
                bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
                yield _row(f"`{kind.__name__}`", bases, _first_paragraph(kind))


def _first_paragraph(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]


# -- Redis keys


def _redis_keys() -> Iterator[str]:
    yield "Every key that Headrace uses in Redis. Celery adds keys of its own."
    yield "Writers are the [users of Redis](../deployment.md#redis-users) that write, delete or extend a key."
    yield "`client` may write what `producer` and `subscriber` may."
    yield "Only keys that [the wire format](../wire.md) names are part of the contract."
    yield from _keys_of("Queue", KEYS)
    yield from _keys_of("Gateway", redis_keys.KEYS)


def _keys_of(title: str, schema: KeySchema) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| key | type | holds | written by | lives |", "|---|---|---|---|---|")
    for key in schema:
        shown = key.pattern.encode("unicode_escape").decode()
        yield _row(f"`{shown}`", key.type, key.holds, ", ".join(key.writers), key.life)


# -- sampling parameters


def _sampling_params() -> Iterator[str]:
    yield "The fields of `headrace_engine.SamplingParams`, with vLLM's names and defaults. A message carries the same"
    yield "fields in `sampling_params`, but for `output_kind`: [wire](../wire.md#request) has their limits there."
    yield "[Sampling](../sampling.md) has the order in which they act."
    for kind in (SamplingParams, StructuredOutputsParams, RepetitionDetectionParams):
        yield from ("", f"## {kind.__name__}", "", "| field | type | default | meaning |", "|---|---|---|---|")
        texts = _field_texts(kind)
        types = {field.name: _type_name(field.type) for field in dataclasses.fields(kind)}
        for name, default in _defaults(kind):
            yield _row(
                f"`{name}`", f"`{types[name]}`", _shown(default) or "`None`" * (default is None), texts.get(name, "")
            )


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else re.sub(r"\b(?:[a-z_]\w*\.)+", "", str(kind))


# -- tables


def _field_texts(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class, by the name of the field."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    texts: dict[str, str] = {}
    name = ""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name:
            texts[name] = inspect.cleandoc(str(statement.value.value))
            name = ""
        else:
            name = ""
    return texts


def _shown(default: object) -> str:
    if default in (None, "", [], (), {}):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{getattr(default, 'value', default)}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    if parser.parse_args().check:
        old = stale()
        if old:
            sys.stderr.write(f"{', '.join(old)} in docs/ differ from the code; run `{COMMAND}`\n")
        return 1 if old else 0
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
