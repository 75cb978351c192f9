"""`make stack`: the unmodified docker-compose.yml on a real Docker daemon, with a table of what was killed and lost.

The images are built from the real Dockerfile. The machine's own Docker is used if it can pull the real base images.
Otherwise base images are made from the package registries, and a daemon runs in a network namespace of its own. Grafana
is then a stand-in, since no package registry has it. The exit status is 1 if a request was lost or a check failed, and
0 if the stack cannot run on this machine: the last line says why.

`make stack-upgrade` kills nothing: it starts the stack of an earlier commit, upgrades it to the working tree, and
returns to the commit.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from headrace_engine.checkpoints import default_model
from stack.checks import Round, Rounds, confinement_problems, prometheus_problems
from stack.daemon import PrivateDaemon, Skipped, users_daemon
from stack.progress import elapsed, progress
from stack.registries import ROOT, fetch_plugins, fetch_wheels, make_bases, package_index
from stack.service import SERVICES, Stack, StackError, show_logs
from stack.upgrade import returned, upgraded
from stack.versions import commit, working_tree


@dataclass
class Report:
    """What a run found."""

    daemon: str = ""
    skipped: str | None = None
    built_after: float = 0.0
    image_bytes: dict[str, int] = field(default_factory=dict)
    worker_ready_seconds: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    name_lookups: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.problems) or any(one.failed for one in self.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stack", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write all measurements to FILE")
    parser.add_argument(
        "--from", dest="earlier", metavar="COMMIT", help="upgrade the stack of COMMIT, and return to it"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # what was started is taken down
    report = Report()
    scratch = Path(tempfile.mkdtemp(prefix="headrace-stack-"))
    try:
        scratch.chmod(0o755)  # user 10001 reads the model there
        run(scratch, options.earlier, report)
    except Skipped as reason:
        report.skipped = str(reason)
    except StackError as error:
        report.problems.append(str(error))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report.seconds = elapsed()
    print_report(report)
    if options.json:
        Path(options.json).write_text(json.dumps(asdict(report), indent=1))
    return 1 if report.failed else 0


def run(scratch: Path, earlier: str | None, report: Report) -> None:
    with built(scratch, earlier, report) as (stack, versions):
        report.built_after = elapsed()
        try:
            rounds = started(stack, report)
            if earlier is None:
                kill_each(stack, rounds, report)
            else:
                upgrade_and_return(stack, rounds, versions, report)
        except StackError:
            show_logs(stack)
            raise
        finally:
            progress("taking everything down")
            stack.down()


@contextmanager
def built(scratch: Path, earlier: str | None, report: Report) -> Iterator[tuple[Stack, list[Path]]]:
    """Yield the stack of the first version with its images, on a daemon that can run it, and the files of versions."""
    unusable = users_daemon(base_images(ROOT)["python"])
    if unusable is None:
        report.daemon = "the machine's own, with the real base images"
        versions = versions_of(scratch, earlier)
        stack = prepared(scratch, versions[0], {}, None)
        report.image_bytes = build(stack)
        yield stack, versions
        return
    report.daemon = f"one in a network namespace of its own, with base images made here ({unusable})"
    progress(f"the machine's own Docker is not used: {unusable}")
    daemon = PrivateDaemon(scratch)
    versions = versions_of(scratch, earlier)
    docker = {"DOCKER_HOST": daemon.socket, "DOCKER_CONFIG": str(daemon.config)}
    for name in ("wheels", "plugins"):
        (scratch / name).mkdir()
    fetch_plugins(daemon.config / "cli-plugins", scratch / "plugins")
    for files in versions:
        fetch_wheels(scratch / "wheels", files)
    images = sorted({pair for files in versions for pair in base_images(files).items()})
    try:
        daemon.start("host")
        with package_index(scratch / "wheels") as index:
            make_bases(["docker", "-H", daemon.socket], scratch, index, images)
            # the first comes last, so that its images are in use; a later build of the others finds all in the cache
            for files in reversed(versions):
                stack = prepared(scratch, files, docker, "host")
                report.image_bytes = build(stack)
        daemon.stop()
        daemon.start("own")
        stack.use_inside(daemon.inside())
        yield stack, versions
    finally:
        daemon.stop()


def versions_of(scratch: Path, earlier: str | None) -> list[Path]:
    """Return the files of the earlier version, if one is named, and those of the working tree."""
    found = [] if earlier is None else [commit(earlier, scratch / "versions" / "earlier")]
    return [*found, working_tree(scratch / "versions" / "working-tree")]


def prepared(scratch: Path, files: Path, docker: dict[str, str], network: str | None) -> Stack:
    model = scratch / "model"
    if not model.exists():
        shutil.copytree(default_model.fetch(progress=progress), model)
    stack = Stack(files, scratch / f"stack-{files.name}", docker, network)
    stack.prepare(model, default_model.NAME)
    return stack


def build(stack: Stack) -> dict[str, int]:
    progress("building the images from the Dockerfile")
    return stack.build()


def base_images(files: Path) -> dict[str, str]:
    """Return the images that a version's compose file and Dockerfile name."""
    services = yaml.safe_load((files / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    images = {name: services[name]["image"] for name in ("redis", "prometheus", "grafana")}
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (files / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return {"python": found[1], **images}


def started(stack: Stack, report: Report) -> Rounds:
    """Start the services, and answer an undisturbed round."""
    progress("starting the services")
    stack.make_key()
    stack.up()
    report.worker_ready_seconds["first start, which compiles the kernels"] = stack.seconds_until_the_worker_was_ready()
    progress("checking what a service may do")
    report.problems += confinement_problems(stack)
    rounds = Rounds(stack, default_model.NAME)
    report.rounds.append(rounds.run("nothing"))
    return rounds


def kill_each(stack: Stack, rounds: Rounds, report: Report) -> None:
    for service in SERVICES:
        report.rounds.append(rounds.kill(service))
        if service == "worker":
            report.worker_ready_seconds["start after a kill"] = stack.seconds_until_the_worker_was_ready()
    report.rounds.append(rounds.kill("worker", "redis"))
    report.rounds.append(rounds.change_users())
    ask_prometheus(stack, report)


def upgrade_and_return(stack: Stack, rounds: Rounds, versions: list[Path], report: Report) -> None:
    earlier, later = versions
    report.rounds.append(upgraded(stack, rounds, later))
    report.worker_ready_seconds["start of the later version"] = stack.seconds_until_the_worker_was_ready()
    ask_prometheus(stack, report)
    report.problems += confinement_problems(stack)
    report.rounds.append(rounds.run("nothing, with the later version"))
    report.rounds.append(returned(stack, rounds, earlier, default_model.NAME))
    report.worker_ready_seconds["start after the return"] = stack.seconds_until_the_worker_was_ready()
    ask_prometheus(stack, report)


def ask_prometheus(stack: Stack, report: Report) -> None:
    progress("asking Prometheus")
    problems, report.name_lookups = prometheus_problems(stack)
    report.problems += problems


def print_report(report: Report) -> None:
    if report.rounds:
        print("| fault | sent | pending | left to the next worker | lost | changed | healthy after | answered after |")
        print("|---|---|---|---|---|---|---|---|")
    for one in report.rounds:
        healthy = "" if one.healthy_after is None else f"{one.healthy_after:.0f} s"
        counts = f"{one.sent} | {one.pending} | {one.by_next_worker} | {len(one.lost)} | {len(one.changed)}"
        print(f"| {one.fault} | {counts} | {healthy} | {one.seconds:.0f} s |")
        report.problems += [f"{one.fault}: {problem}" for problem in one.problems]
    print(f"\ndaemon: {report.daemon}")
    for name, size in report.image_bytes.items():
        print(f"image of {name}: {size / 1e6:.0f} MB")
    for name, seconds in report.worker_ready_seconds.items():
        print(f"worker ready, {name}: {seconds:.0f} s")
    for name, value in report.name_lookups.items():
        print(f"{name}: {value:.0f}")
    for problem in report.problems:
        print(f"problem: {problem}")
    print(f"built after {report.built_after / 60:.1f} min, ended after {report.seconds / 60:.1f} min")
    if report.skipped is not None:
        print(f"skipped: {report.skipped}")


if __name__ == "__main__":
    sys.exit(main())
