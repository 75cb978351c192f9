"""Put faults in by hand, one of each kind, and list which tests of a short run catch them: `make mutations`.

Each fault is one replacement in a copy of the checkout, in which the tests that should catch it run; they must pass
before. The text to replace must occur exactly once in all packages and deployment files, whichever file has it. Names
on the command line choose faults: `python tests/mutations.py sampling scheduler`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """One kind of fault: `old` becomes `new`, and one of the test files named `tests` must fail."""

    kind: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS: Final = (
    Fault(
        "scheduler",
        "arrival counts before priority",
        "return request.priority, request.arrival_time, request.request_id",
        "return request.arrival_time, request.priority, request.request_id",
        ("unit/engine/test_scheduler.py",),
    ),
    Fault(
        "block-pool",
        "a shared block is counted once",
        "            block.ref_count += 1\n",
        "            block.ref_count = 1\n",
        ("unit/engine/test_block_pool.py",),
    ),
    Fault(
        "sampling",
        "top-p keeps one token too few",
        "num_kept = (before < top_p)",
        "num_kept = (before + ordered < top_p)",
        ("engine/test_sampler.py",),
    ),
    Fault(
        "lease",
        "messages whose leases have not expired are requeued",
        "redis.call('ZRANGEBYSCORE', LEASES, '-inf', now(), 'LIMIT', 0, most)",
        "redis.call('ZRANGEBYSCORE', LEASES, '-inf', '+inf', 'LIMIT', 0, most)",
        ("service/broker/test_leases.py",),
    ),
    Fault(
        "stream",
        "an entry may leave a gap behind a lost one",
        "if attempt < mine or last_offset >= offset or tokens ~= expected or is_over then",
        "if attempt < mine or last_offset >= offset or is_over then",
        ("service/broker/test_streams.py", "service/broker/test_stream_protocol.py"),
    ),
    Fault(
        "resume",
        "a request resumes from its prompt",
        "core_request.output_token_ids = list(choice.token_ids)",
        "core_request.output_token_ids = []",
        ("unit/workers/test_job.py", "unit/workers/test_publish_interval.py"),
    ),
    Fault(
        "gateway-field",
        "top_logprobs has no upper limit",
        '"top_logprobs": SAMPLING["logprobs"],',
        '"top_logprobs": Integer(0, 10**9),',
        ("unit/gateway/test_chat_fields.py",),
    ),
    Fault(
        "tool-call-parser",
        "Llama 3's tag for Python is content",
        '_PYTHON_TAG = "<|python_tag|>"',
        '_PYTHON_TAG = "<|python-tag|>"',
        ("unit/gateway/parsers/test_call_formats.py",),
    ),
    Fault(
        "acl",
        "the exporter may write",
        "user exporter on >${REDIS_EXPORTER_PASSWORD} resetchannels %R~headrace*",
        "user exporter on >${REDIS_EXPORTER_PASSWORD} resetchannels ~headrace*",
        ("unit/test_redis_users_are_generated.py",),
    ),
    Fault(
        "metric-name",
        "a counter of tokens has another name",
        'make.counter("generation_tokens_total"',
        'make.counter("generated_tokens_total"',
        ("unit/monitoring/test_metrics.py", "unit/monitoring/test_prometheus_files.py"),
    ),
)


def packages(root: Path) -> list[str]:
    """Return the folders that an editable install puts on the path."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return list(project["tool"]["hatch"]["build"]["dev-mode-dirs"])


def copy_checkout(target: Path) -> None:
    """Copy every file that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def put_in(fault: Fault, root: Path) -> Path:
    """Put the fault into the one file that it fits, and return the file. ValueError: not exactly one place fits."""
    files = [
        path
        for folder in [*packages(root), "deploy"]
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".lua", ".acl")
    ]
    places = [path for path in files for _ in range(path.read_text(encoding="utf-8").count(fault.old))]
    if len(places) != 1:
        raise ValueError(f"the text to replace occurs {len(places)} times, must be 1: {fault.old!r}")
    places[0].write_text(places[0].read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
    return places[0]


def run_tests(tests: Sequence[str], root: Path) -> tuple[list[str], str]:
    """Run the test files in the copy. Return the tests that failed, and the end of the output.

    Raises:
        RuntimeError: the tests could not run, for instance because a file is gone.
    """
    paths = [str(root / folder) for folder in packages(root)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "pytest", "--short", "-p", "no:cacheprovider", "--tb", "no", "-rfE"]
    command += [f"tests/{name}" for name in tests]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {', '.join(tests)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\S+)", done.stdout, re.MULTILINE)
    return failed, done.stdout[-2000:] + done.stderr[-2000:]


def is_caught(fault: Fault) -> bool:
    """Put the fault into a copy, run its tests and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_checkout(root)
        try:
            file = put_in(fault, root).relative_to(root)
        except ValueError as error:
            print(f"{fault.kind:16} {error}", flush=True)
            return False
        failed, output = run_tests(fault.tests, root)
    outcome = f"caught by {failed[0]} and {len(failed) - 1} more" if failed else f"NOT CAUGHT\n{output}"
    print(f"{fault.kind:16} {fault.what} ({file}): {outcome}", flush=True)
    return bool(failed)


def main(kinds: list[str]) -> int:
    unknown = set(kinds) - {fault.kind for fault in FAULTS}
    if unknown:
        print(f"kinds must be of {', '.join(fault.kind for fault in FAULTS)}, got {', '.join(sorted(unknown))}")
        return 2
    chosen = [fault for fault in FAULTS if not kinds or fault.kind in kinds]
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        failed, output = run_tests(sorted({name for fault in chosen for name in fault.tests}), Path(folder))
    if failed:
        print(f"the tests must pass without a fault, {len(failed)} failed\n{output}")
        return 2
    caught = [is_caught(fault) for fault in chosen]
    print(f"{caught.count(False)} not caught")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
