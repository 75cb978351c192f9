"""`headrace worker`: flags become the environment variables of the same name, then Celery's worker runs."""

import os
import socket
import sys
from typing import Any

import click

from headrace_engine import default_model
from headrace_engine.own_engine import DEVICES, DTYPES


@click.command()
@click.option("--model", metavar="PATH_OR_NAME", help=f"Model folder, hub name, or {default_model.NAME}.")
@click.option("--served-model-name", metavar="NAME", help="Name in the queue [default: last part of the model's path].")
@click.option("--queues", metavar="NAME,...", help="More served names of this model, whose queues come after its own.")
@click.option("--redis-url", metavar="URL", help="redis://, rediss://, unix:// or sentinel:// [default: local Redis].")
@click.option("--engine", metavar="NAME", help="What computes: headrace, vllm, or an installed one [headrace].")
@click.option("--engine-python", metavar="PATH", help="Python of an environment with the engine [default: this one].")
@click.option("--engine-args", metavar="JSON", help="Another engine's own options, by its own names [default: none].")
@click.option("--device", metavar="NAME", help=f"Where the model runs: {', '.join(DEVICES)} [auto].")
@click.option("--dtype", metavar="NAME", help=f"Precision of the model: {', '.join(DTYPES)} [auto].")
@click.option(
    "--kv-cache-dtype", metavar="NAME", help="Of keys and values: auto, bfloat16, or fp8 on device cuda [auto]."
)
@click.option("--quantization", metavar="NAME", help="int8: matrix products in 8 bits, on CPUs [default: off].")
@click.option("--max-num-seqs", type=int, metavar="N", help="Requests that run at once [default: 64].")
@click.option("--max-num-batched-tokens", type=int, metavar="N", help="Token budget of a step [512 on a CPU].")
@click.option(
    "--long-prefill-token-threshold",
    type=int,
    metavar="N",
    help="Most tokens of one prompt a step [default: no limit].",
)
@click.option(
    "--async-scheduling", is_flag=True, default=None, help="Device cuda: schedule during a step [default: off]."
)
@click.option("--watermark", type=float, metavar="SHARE", help="KV blocks kept free at admission [default: 0.01].")
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="Share computed prompt beginnings [on]."
)
@click.option(
    "--share-prefix-cache", is_flag=True, default=None, help="Let tenants use each other's computed beginnings [off]."
)
@click.option("--tool-parser", metavar="NAME", help="Format of the model's tool calls, for clients [default: auto].")
@click.option("--reasoning-parser", metavar="NAME", help="Format of the model's reasoning, likewise [default: auto].")
@click.option("--max-model-len", type=int, metavar="N", help="Tokens of prompt and output [default: the model's].")
@click.option(
    "--kv-cache-memory", metavar="SIZE", help="KV cache, e.g. 2GiB [default: a quarter of free memory, max 4]."
)
@click.option("--enforce-eager", is_flag=True, default=None, help="Device cuda without CUDA graphs [default: off].")
@click.option("--batch-invariant", is_flag=True, default=None, help="Same bits in any company; slower [default: off].")
@click.option(
    "--generation-config",
    metavar="SOURCE",
    help="Defaults of sampling parameters: vllm, auto (the checkpoint's) or a folder [default: vllm].",
)
@click.option(
    "--override-generation-config", metavar="JSON", help="Such defaults, e.g. '{\"temperature\": 0.7}' [default: none]."
)
@click.option(
    "--speculative-config",
    metavar="JSON",
    help='Speculative decoding, e.g. \'{"method": "ngram", "num_speculative_tokens": 4}\' [default: off].',
)
@click.option(
    "--logits-processors", metavar="PATHS", help="Your own, package.module:Class, separated by commas [default: none]."
)
@click.option("--lora-modules", metavar="NAME=FOLDER,...", help="LoRA adapters that messages may name [default: none].")
@click.option("--lora-dir", metavar="FOLDER", help="Its subfolders are LoRA adapters; they may come and go.")
@click.option("--max-loras", type=int, metavar="N", help="Adapters in one batch [default: 4].")
@click.option("--max-lora-rank", type=int, metavar="N", help="Largest rank of an adapter [default: 16].")
@click.option("--max-cpu-loras", type=int, metavar="N", help="Adapters in memory [default: all named, or max-loras].")
@click.option("--prefill-buckets", metavar="N,N", help="Prompt tokens of a step that neuron and xla compile.")
@click.option("--decode-buckets", metavar="N,N", help="Requests of a step that neuron and xla compile.")
@click.option("--context-buckets", metavar="N,N", help="Context lengths that neuron and xla compile.")
@click.option("--tensor-parallel-size", type=int, metavar="N", help="NeuronCores that share the model [default: 1].")
@click.option("--compile-cache-dir", metavar="DIR", help="Where neuron and xla keep what they compiled.")
@click.option("--metrics-host", metavar="HOST", help="Address of metrics and health [default: 127.0.0.1].")
@click.option("--metrics-port", type=int, metavar="PORT", help="Its port, 0 for a free one [default: 9464].")
@click.option("--tenants", metavar="A,B", help="Tenants with metrics of their own; all others count together.")
@click.option("--tenant-weights", metavar="A=4,B=2", help="Shares of the queue, by tokens [default: 1 for everybody].")
@click.option(
    "--max-queued-requests-per-tenant",
    type=int,
    metavar="N",
    help="Requests of a tenant that may wait; more are refused [default: no limit].",
)
@click.option(
    "--ageing-seconds",
    type=float,
    metavar="S",
    help="Waiting so long is worth one priority step, 0: nothing [default: 120].",
)
@click.option("--prefix-affinity", is_flag=True, default=None, help="Prefer prompts that begin as recent ones [off].")
@click.option("--tracing", is_flag=True, default=None, help="Export a trace of each request by OpenTelemetry's OTLP.")
@click.option("--grace-seconds", type=float, metavar="S", help="Time for running requests after SIGTERM [default: 30].")
@click.option(
    "--lease-seconds", type=float, metavar="S", help="A silent worker loses its requests after [default: 15]."
)
@click.option(
    "--stall-seconds",
    type=float,
    metavar="S",
    help="Restart an engine without a step for so long [60; vllm: 300].",
)
@click.option(
    "--publish-interval", type=float, metavar="S", help="Gather tokens for so long into a chunk [default: each step's]."
)
@click.option(
    "--max-preemptions",
    type=int,
    metavar="N",
    help="So often a request makes room for better priorities; 0: never [default: 3].",
)
@click.option(
    "--preemption-wait-seconds",
    type=float,
    metavar="S",
    help="A request waits so long for a slot before it preempts [default: 0.05].",
)
@click.option("--max-delay-seconds", type=float, metavar="S", help="Refuse an ETA further ahead [default: 86400].")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), help="[default: INFO]")
@click.option("--drain", is_flag=True, help="Start nothing: tell running workers to take no more, and end when done.")
@click.option(
    "--worker", "workers", multiple=True, metavar="NAME", help="With --drain: only this one; may be repeated."
)
def worker(drain: bool, workers: tuple[str, ...], **flags: Any) -> None:
    """Serve a model: take requests from its queue, generate, stream back.

    Every flag can also be given as an environment variable HEADRACE_<FLAG>, e.g. HEADRACE_REDIS_URL. SIGTERM lets
    running requests finish within the grace time and hands the rest to other workers; SIGQUIT hands back at once. With
    --drain no worker is started: all running ones, or those named, drain as `headrace control drain` has them do.

    \b
    Example:
        headrace worker --model smollm2-135m-instruct --redis-url redis://127.0.0.1:6379/0
    """
    if drain:
        _drain(workers, flags)
        return
    if workers:
        raise click.UsageError("--worker goes with --drain")
    for name, value in flags.items():
        if value is not None:
            os.environ[f"HEADRACE_{name.upper()}"] = str(value)
    from celery.signals import worker_shutdown

    from headrace_monitoring.logging import takes_colours
    from headrace_workers.app import create_app
    from headrace_workers.settings import WorkerSettings

    settings = WorkerSettings.from_env()
    settings.engine_config()  # wrong options and an unknown default model end here, in one sentence
    app = create_app(settings)
    name = f"headrace-{settings.served_name}-{os.getpid()}@{socket.gethostname()}"
    exit_codes: list[int] = []  # Celery's command swallows the exit code when it is called as a function

    @worker_shutdown.connect(weak=False)
    def keep_exit_code(sender: Any, **_: Any) -> None:
        exit_codes.append(sender.exitcode or 0)

    plain = [] if takes_colours(sys.stdout) else ["--no-color"]  # Celery's banner asks about stderr
    app.worker_main(
        [*plain, "worker", "--without-gossip", "--without-mingle", "--hostname", name, "--loglevel", "INFO"]
    )
    sys.exit(max(exit_codes, default=1))


def _drain(workers: tuple[str, ...], flags: dict[str, Any]) -> None:
    from headrace_broker.settings import BrokerSettings
    from headrace_workers.cli.control import ANSWER_SECONDS, tell_workers

    given = {name: value for name, value in flags.items() if value is not None}
    redis_url, grace_seconds = given.pop("redis_url", None), given.pop("grace_seconds", None)
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{names}: with --drain no worker is started")
    settings = BrokerSettings.from_env(os.environ) if redis_url is None else BrokerSettings(redis_url=redis_url)
    arguments = {} if grace_seconds is None else {"grace_seconds": grace_seconds}
    tell_workers(settings, "drain", workers, ANSWER_SECONDS, arguments)
