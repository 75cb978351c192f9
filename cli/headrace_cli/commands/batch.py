"""`headrace batch`: run a file of requests through the queue, without a gateway. Needs no torch."""

import asyncio
import json
import math
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

import click

from headrace_broker import HeadraceBrokerError
from headrace_cli.batch.batch_run import BatchCounts, BatchRun, BatchSettings
from headrace_cli.commands import options
from headrace_gateway.batch.input_file import STANDARD
from headrace_gateway.errors import BatchError, InputRefusedError

_DEFAULTS = BatchSettings("", "", "", "")
_FAILED, _REFUSED, _SOME_ERRORS = 1, 2, 3
_SUFFIX = ".jsonl"
_REPORT_SECONDS = 60.0


@click.group()
def batch() -> None:
    """Run a file of requests, in the formats of OpenAI's Batch API and of vLLM's `run-batch`."""


@batch.command()
@click.argument("source", metavar="INPUT")
@click.argument("output", metavar="OUTPUT")
@click.option("--errors", metavar="FILE", help="File for error answers [default: OUTPUT with suffix .errors.jsonl].")
@click.option(
    "--window",
    type=click.IntRange(1, 10_000),
    default=_DEFAULTS.window,
    show_default=True,
    help="Maximum number of lines in the queue at once.",
)
@click.option(
    "--priority",
    type=click.IntRange(0, 9),
    default=_DEFAULTS.priority,
    show_default=True,
    help="Priority of the lines, from 0 (served first) to 9; a line may ask to be served later.",
)
@options.redis_url
@options.as_json
def run(
    source: str, output: str, errors: str | None, window: int, priority: int, redis_url: str, as_json: bool
) -> None:
    """Send every line of INPUT and append its answer to OUTPUT. `-` is standard input or output.

    Run the same command again to resume after Ctrl-C, SIGTERM, kill -9 or a full disk: lines with an answer in OUTPUT
    or in the error file are not sent again. Every line of INPUT is checked before the first is sent.

    \b
    Exit code 0: every answer is in OUTPUT.     3: every line has an answer, some are errors.
              1: the run failed.                2: INPUT was refused, and nothing was sent.
            130: Ctrl-C (143: SIGTERM).

    \b
    Example of a line of INPUT, wrapped here:
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "my-model", "messages": [{"role": "user", "content": "Name three rivers."}]}}
    """
    if output == STANDARD and errors is None:
        raise click.UsageError("OUTPUT - needs a file for error answers: --errors FILE")
    if output == STANDARD and as_json:
        raise click.UsageError("--json prints to standard output: OUTPUT must be a file")
    errors = f"{output.removesuffix(_SUFFIX)}.errors{_SUFFIX}" if errors is None else errors
    if errors == STANDARD:
        raise click.UsageError("--errors must be a file, not standard output")
    began = time.monotonic()
    settings = BatchSettings(source, output, errors, redis_url, window, priority)
    with click.progressbar(
        length=1,
        label="lines",
        show_pos=True,
        item_show_func=lambda item: item,
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    ) as bar:
        progress = _Progress(bar)
        run = BatchRun(settings, on_progress=progress.show, on_waiting=progress.wait)
        outcome = _outcome(run)
    summary = {**outcome, **asdict(run.counts), "output": output, "errors": errors}
    if as_json:
        click.echo(json.dumps({**summary, "seconds": round(time.monotonic() - began, 3)}))
    elif "message" in outcome:
        click.echo(f"headrace: {outcome['message']}", err=True)
    if run.counts.total and not as_json:
        counts = run.counts
        failed = f", {counts.failed} in {errors}" if counts.failed else ""
        click.echo(f"{counts.completed} of {counts.total} answers are in {run.output_name}{failed}", err=True)
    sys.exit(outcome["exit_code"])


def _outcome(run: BatchRun) -> dict[str, Any]:
    """Run the batch, and return how it ended, for the summary."""
    try:
        asyncio.run(_until_sigterm(run))
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        message = "interrupted; requests in the queue continue: run the same command again to collect their answers"
        return {"status": "interrupted", "message": message, "exit_code": 128 + number}
    except InputRefusedError as error:
        problems = {"problems": [asdict(problem) for problem in error.problems], "num_problems": error.num_problems}
        return {"status": "refused", "message": str(error), **problems, "exit_code": _REFUSED}
    except (BatchError, HeadraceBrokerError) as error:
        return {"status": "failed", "message": str(error), "exit_code": _FAILED}
    if run.counts.failed:
        return {"status": "completed_with_errors", "exit_code": _SOME_ERRORS}
    return {"status": "completed", "exit_code": 0}


async def _until_sigterm(run: BatchRun) -> None:
    running = asyncio.create_task(run.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await running


class _Progress:
    """Draw a bar on a terminal, and print why the run waits, at most once a minute."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._shown: int | None = None
        self._reported_at = -math.inf

    def show(self, counts: BatchCounts) -> None:
        done = counts.completed + counts.failed
        if self._shown is None:  # lines that an earlier run answered must not count in the speed
            self._bar.length = counts.total - done
            self._shown = done
        self._bar.update(done - self._shown, f"{counts.failed} errors" if counts.failed else "")
        self._shown = done

    def wait(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            click.echo(f"waiting: {reason}" if self._bar.hidden else f"\nwaiting: {reason}", err=True)
