"""`headrace demo`: run the demo and draw it in a terminal."""

import signal
import sys
from collections.abc import Sequence

import click
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace_cli.demo.demo import MAX_TOKENS, QUESTIONS, Demo, DemoAnswer, Report
from headrace_cli.demo.steady_load import SteadyLoad
from headrace_engine.checkpoints import default_model

_PANEL_LINES = 9


@click.command()
@click.option("--keep", is_flag=True, help="Leave the service running afterwards, until Ctrl-C, to try things out.")
@click.option(
    "--watch",
    is_flag=True,
    help="Like --keep, with a small steady load, and metrics on the ports in monitoring/prometheus/local.yml.",
)
def demo(keep: bool, watch: bool) -> None:
    """Show the whole service once, on this machine. Needs no Redis, no GPU and no configuration.

    Fetches a small model (93 MB, once), starts a Redis-compatible server and a Celery worker, sends eight chat requests
    at once from another process, draws the eight token streams live, checks that every result equals its stream, and
    leaves no process behind.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM, too, cleans up
    console = Console()
    live = Live(console=console, refresh_per_second=12)

    def draw(answers: Sequence[DemoAnswer]) -> None:
        live.start()
        live.update(_answers(answers, console))

    def hold(report: Report, redis_url: str) -> None:
        live.stop()
        _print_report(console, report)
        console.print(
            f"\nTry in another terminal:\n"
            f"  export HEADRACE_REDIS_URL={redis_url}\n"
            f'  .venv/bin/headrace generate --chat "What is a headrace?"\n'
            f"  curl -s {report.metrics_url} | grep headrace_generation_tokens_total",
            highlight=False,
            soft_wrap=True,  # a line to paste must not be broken
        )
        console.print("[dim]The service runs until Ctrl-C.[/]")
        try:
            if watch:
                console.print("A few requests are sent every few seconds: docs/quickstart.md says how to watch them.")
                SteadyLoad(redis_url, report.model, QUESTIONS, progress).run()
            signal.pause()
        except KeyboardInterrupt:
            console.print("stopping")

    def progress(line: str) -> None:
        console.print(f"[dim]{line}[/]", highlight=False)

    try:
        model = default_model.fetch(progress=progress)
        report = Demo(model, progress, draw, hold if keep or watch else None, watched=watch).run()
    except KeyboardInterrupt:
        live.stop()
        console.print("stopped")
        sys.exit(130)
    finally:
        live.stop()
    if not (keep or watch):
        _print_report(console, report)
        console.print(
            "\nWorker and queue are stopped. Next: [bold]headrace demo --keep[/] leaves them running to try\n"
            '[bold]headrace generate --chat "..."[/] beside it; docs/enqueue.md shows how another service does it.'
        )


def _answers(answers: Sequence[DemoAnswer], console: Console) -> Group:
    width = max(30, console.width // 2 - 2)
    panels = []
    for answer in answers:
        shown = Text(answer.text)
        lines = shown.wrap(console, width - 4)
        body = Text("\n").join(lines[-_PANEL_LINES:] if console.is_terminal else lines)
        done = f"{answer.timing.num_tokens} tokens, {answer.finish_reason}" if answer.finish_reason else "..."
        panels.append(
            Panel(
                body,
                title=Text(answer.question, style="bold"),
                subtitle=done,
                width=width,
                height=_PANEL_LINES + 2 if console.is_terminal else None,
                border_style="green" if answer.finish_reason else "cyan",
            )
        )
    return Group(Columns(panels, padding=(0, 0)))


def _print_report(console: Console, report: Report) -> None:
    figures = report.figures
    table = Table(
        title=f"{len(report.answers)} requests at once, at most {MAX_TOKENS} tokens each", title_justify="left"
    )
    table.add_column("")
    table.add_column("p50", justify="right")
    table.add_column("p99", justify="right")
    for name, key in (("time to first token", "ttft"), ("inter-token latency", "itl")):
        table.add_row(name, f"{1000 * figures[f'{key}_p50']:.0f} ms", f"{1000 * figures[f'{key}_p99']:.0f} ms")
    console.print(table)
    console.print(
        f"{figures['output_tokens']:.0f} output tokens, {figures['output_tokens_per_second']:.0f} tokens/s; "
        "every AsyncResult.get() equals its stream"
    )
    console.print(f"metrics were served on {report.metrics_url}", highlight=False)
