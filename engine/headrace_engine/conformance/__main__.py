"""The command line: prints a table or JSON, and returns an exit code.

0: all cases passed; 1: a case failed; 2: the engine does not start, or the command is wrong.
"""

import argparse
import json
import sys
from typing import Any

from headrace_engine.conformance.case import Broken
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.conformance.suite import Outcome, Suite, Verdict, count, report
from headrace_engine.errors import HeadraceEngineError


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    options = {name: getattr(args, name) for name in ("model", "engine", "engine_python", "engine_args")} | args.options
    launcher = Launcher(options=options, patience=args.patience, start_patience=max(args.patience, 600.0))
    suite = Suite(launcher, args.only)
    if not suite.cases:
        _say(f"--only: no case holds {' or '.join(args.only)}", to_people=True)
        return 2
    verdicts: list[Verdict] = []
    try:
        for verdict in suite.run():
            verdicts.append(verdict)
            _say(_row(verdict), to_people=args.json)
    except (HeadraceEngineError, Broken, TimeoutError) as error:
        _say(f"the engine {args.engine} does not start: {error}", to_people=True)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        _say(json.dumps(report(suite, verdicts, args.engine), indent=1))
    else:
        _say("\n".join(_summary(args.engine, verdicts)))
    return 1 if any(verdict.outcome is Outcome.FAILED for verdict in verdicts) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m headrace_engine.conformance", description="Check that an engine keeps what it promises."
    )
    parser.add_argument("--engine", required=True, metavar="NAME", help="its name among the entry points")
    parser.add_argument("--model", required=True, metavar="DIR", help="a small model; the suite computes in float32")
    parser.add_argument("--engine-python", metavar="PATH", help="interpreter of the engine; default: this one")
    parser.add_argument("--engine-args", type=_map, default={}, metavar="JSON", help="the engine's own options")
    parser.add_argument(
        "--options", type=_map, default={}, metavar="JSON", help='more of EngineArgs, such as {"device": "cuda"}'
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose group or text holds a word")
    parser.add_argument("--patience", type=float, default=120.0, metavar="SECONDS", help="silence that fails a case")
    parser.add_argument("--json", action="store_true", help="JSON on standard output, progress on standard error")
    return parser.parse_args(arguments)


def _map(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a map in JSON, got {text}")
    return value


def _row(verdict: Verdict) -> str:
    case = verdict.case
    reason = f"\n{'':34}{verdict.reason}" if verdict.reason else ""
    return f"{verdict.outcome.value:14} {verdict.seconds:5.1f} s  {case.group:11} {case.sentence}{reason}"


def _summary(engine: str, verdicts: list[Verdict]) -> list[str]:
    groups = sorted({verdict.case.group for verdict in verdicts})
    names = [outcome.value for outcome in Outcome]
    lines = ["", f"{engine:14}" + "".join(f"{name:>16}" for name in names)]
    for group in groups:
        counts = count(verdict for verdict in verdicts if verdict.case.group == group)
        lines.append(f"{group:14}" + "".join(f"{counts[name]:>16}" for name in names))
    counts = count(verdicts)
    lines.append(f"{'all':14}" + "".join(f"{counts[name]:>16}" for name in names))
    lines += [f"failed: {v.case.group}.{v.case.name}" for v in verdicts if v.outcome is Outcome.FAILED]
    return lines


def _say(text: str, *, to_people: bool = False) -> None:
    """Write to standard output, or to standard error if standard output is for JSON (`to_people`)."""
    (sys.stderr if to_people else sys.stdout).write(text + "\n")
    (sys.stderr if to_people else sys.stdout).flush()


if __name__ == "__main__":
    sys.exit(main())
