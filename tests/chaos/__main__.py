"""`make chaos`: rounds of random faults on a real service, with a table of what was lost.

Exit status 1 where anything was lost, doubled, out of order, other than undisturbed, or left over.
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chaos.faults import FAULTS, STREAM_SERVER_FAULTS
from chaos.harness import Harness, Round, summary
from chaos.model import save_chaos_model
from chaos.site import Site
from engine.model_families import FAMILIES
from service.servers import PROGRAM

ROUNDS_A_LINE: Final = 20


def main() -> int:
    names = {fault.__name__: fault for fault in (*FAULTS, *STREAM_SERVER_FAULTS)}
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=sorted(names), help="only these [default: all]")
    parser.add_argument("--json", metavar="FILE", help="write every round and the summary there")
    parser.add_argument("--server", metavar="PROGRAM", default=PROGRAM, help="[default: %(default)s]")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the workers' logs there")
    parser.add_argument("--vllm", metavar="PYTHON", help="workers whose engine is vLLM, by the Python that has it")
    parser.add_argument("--stream-servers", type=int, default=0, help="servers of their own for the streams")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="the architecture of the model [default: llama]")
    options = parser.parse_args()
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service's processes are ended on the way out
    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(options.logs or temporary) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # vLLM's attention on a CPU wants heads of 32 numbers at least
        family = options.family or ("qwen2" if options.vllm else "llama")
        model = save_chaos_model(Path(temporary) / "tiny", family)
        engine = vllm_settings(options.vllm) if options.vllm else None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with (
            Site(
                model,
                logs,
                engine_settings=engine,
                program=options.server,
                num_stream_servers=options.stream_servers,
            ) as site,
            Progress(*columns, console=console) as progress,
        ):
            harness = Harness(site, options.seed)
            task = progress.add_task("undisturbed runs", total=options.rounds)
            harness.learn()

            def report(done: Round) -> None:
                progress.update(task, advance=1, description=done.fault)
                if not console.is_terminal and done.number % ROUNDS_A_LINE == 0:  # a bar shows nothing in a file
                    console.print(f"{done.number} of {options.rounds} rounds")
                for problem in done.problems:
                    progress.console.print(f"round {done.number}, {done.fault}: {problem}", style="red", markup=False)

            own = [*FAULTS, *(STREAM_SERVER_FAULTS if options.stream_servers else ())]
            faults = [names[name] for name in options.faults] if options.faults else own
            rounds = harness.run(options.rounds, report, faults)
    lines = summary(rounds)
    table = Table(*(name.replace("_", " ") for name in lines[0]), title=f"seed {options.seed}")
    for line in lines:
        table.add_row(*("" if value is None else str(value) for value in line.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"summary": lines, "rounds": [asdict(r) for r in rounds]}, indent=1))
    return 1 if lines[-1]["problems"] else 0


def vllm_settings(python: str) -> dict[str, object]:
    """Uncompiled, so that an engine that was killed is back after seconds."""
    return {"engine": "vllm", "engine_python": python, "engine_args": '{"enforce_eager": true}', "device": "auto"}


if __name__ == "__main__":
    sys.exit(main())
