"""Write the pages of docs/reference from the code: `python docs/reference/generate.py [--check]`.

Settings, commands, metrics, errors, Redis keys and sampling parameters are declared in the packages. These pages list
them, so they are never edited by hand. With --check nothing is written: the exit status is 1 where a page is stale.
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
from headrace_broker.reasons import DEAD_LETTER_LABELS, ErrorCode
from headrace_broker.settings import BrokerSettings
from headrace_engine.sampling_params import RepetitionDetectionParams, SamplingParams
from headrace_engine.structured_outputs_params import StructuredOutputsParams
from headrace_gateway import redis_keys
from headrace_gateway.broker_errors import api_error_of_end
from headrace_monitoring import labels
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.service_levels import ModelLevels, RedisLevels, ServiceExposition, ServiceLevels
from headrace_workers.cli.main import _headrace
from headrace_workers.environment import variable_of
from headrace_workers.settings import SETTINGS

FOLDER = Path(__file__).parent
COMMAND = "make reference"
_ERROR_MODULES = (
    "headrace_broker.errors",
    "headrace_engine.errors",
    "headrace_gateway.errors",
    "headrace_workers.errors",
    "headrace_monitoring.errors",
)
_LABELS = labels.LabelSets(dead_letter_reasons=DEAD_LETTER_LABELS)
_MOST_VALUES = 12
"""A label with more values is shown by the first four and the last."""


def pages() -> dict[str, str]:
    """Each page's text by its file name."""
    return {
        "settings.md": _page("Settings", _settings()),
        "cli.md": _page("Commands", _cli()),
        "metrics.md": _page("Metrics", _metrics()),
        "errors.md": _page("Errors", _errors()),
        "redis-keys.md": _page("Redis keys", _redis_keys()),
        "sampling-params.md": _page("SamplingParams", _sampling_params()),
    }


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of the pages whose files differ from the code."""
    return [
        name
        for name, text in pages().items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]


def _page(title: str, lines: Iterable[str]) -> str:
    head = f"<!-- Generated from the code by `{COMMAND}`. Do not edit. -->\n\n# {title}\n\n"
    return head + "\n".join(lines).rstrip() + "\n"


# -- settings


def _settings() -> Iterator[str]:
    yield "Every setting is an environment variable. A worker's settings are also flags of `headrace worker`:"
    yield "`HEADRACE_MAX_NUM_SEQS` is the flag `--max-num-seqs`. A flag wins over its variable. Times are in seconds."
    flags = {option.name: option for option in _command("worker").params}
    yield from ("", "## Queue", "", "Read by clients, workers, the gateway and the exporter.", "")
    yield from ("| variable, flag | default | meaning |", "|---|---|---|")
    texts = _field_texts(BrokerSettings)
    for name, default in _defaults(BrokerSettings):
        flag = flags.get(name)
        names = [f"HEADRACE_{name.upper()}", *(flag.opts if flag is not None else ())]
        yield _row(_lines(names), _shown(default), texts.get(name) or _help(flag))
    yield from ("", "## Worker", "")
    yield "Read by `headrace worker` and `celery -A headrace_workers.app worker`. None: not set."
    yield from ("", "| variable, flag | default | meaning |", "|---|---|---|")
    for setting in SETTINGS:
        default = "required" if setting.name == "model" else _shown(setting.default)
        yield _row(_lines([variable_of(setting), *flags[setting.name].opts]), default, setting.help)
    yield from ("", "## Gateway", "", "Read by `headrace gateway`, beside those of the queue.", "")
    yield from ("| variable, flag | default | meaning |", "|---|---|---|")
    for option in _command("gateway").params:
        if str(option.envvar or "").startswith("HEADRACE_GATEWAY_"):
            yield _row(_lines([str(option.envvar), option.opts[0]]), _shown(_default(option)), _help(option))


def _lines(names: Iterable[str]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


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
    return Metrics(model="MODEL", queue="headrace.MODEL", version="VERSION", label_sets=_LABELS).registry


def _exporter_registry() -> Collector:
    exposition = ServiceExposition(version="VERSION", label_sets=_LABELS)
    level = ModelLevels(
        model="MODEL",
        queue="headrace.MODEL",
        ready={},
        leased=0,
        run_out=0,
        dead={},
        oldest_age_seconds=0.0,
        blocked=False,
        last_seen=0.0,
    )
    redis = RedisLevels(
        memory_used_bytes=0,
        memory_limit_bytes=0,
        connected_clients=0,
        persistence_ok=True,
        may_evict=False,
        evicted_keys=0,
        rejected_connections=0,
    )
    exposition.polled(ServiceLevels(models=[level], redis=redis), 0.0)
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
    yield ", ".join(f"`{code}`" for code in sorted(labels.REFUSALS) if code != labels.OTHER) + "."
    for module_name in _ERROR_MODULES:
        module = importlib.import_module(module_name)
        yield from ("", f"## Exceptions of `{module_name.partition('.')[0]}`", "", "| exception | is a | meaning |")
        yield "|---|---|---|"
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module_name:
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
    """The string that stands below each field of a class."""
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


def _help(option: click.Parameter | None) -> str:
    """The help of an option without the default, which has a column of its own."""
    return re.sub(r" ?\[[^\]]*\]\.?$", "", getattr(option, "help", None) or "")


def _default(option: click.Parameter) -> object:
    return None if type(option.default).__name__ == "Sentinel" or option.default == () else option.default


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
            sys.stderr.write(f"docs/reference: {', '.join(old)} differ from the code; run `{COMMAND}`\n")
        return 1 if old else 0
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
