"""The systemd units, as far as they can be checked without systemd."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_gateway.settings import GatewaySettings

pytestmark = pytest.mark.rotated("deploy/systemd", "gateway/headrace_gateway/settings.py")

UNITS = Path(__file__).resolve().parents[3] / "deploy" / "systemd"


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS / name, encoding="utf-8")
    return parser


@pytest.mark.parametrize("name", ["headrace-worker.service", "headrace-exporter.service", "headrace-gateway.service"])
def test_a_unit_starts_a_command_that_exists_and_runs_without_privileges(name: str) -> None:
    service = unit(name)["Service"]
    command = service["ExecStart"].split()
    help_text = subprocess.run(
        [sys.executable, "-c", "from headrace_cli.main import main; main()", *command[1:], "--help"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert command[0].endswith("/headrace")
    assert help_text.returncode == 0
    assert service["User"] == "headrace"
    assert service["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize("name", ["worker", "exporter", "gateway"])
def test_a_unit_is_valid_for_systemd_and_well_confined(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    text = (UNITS / f"headrace-{name}.service").read_text(encoding="utf-8")
    file = tmp_path / f"headrace-{name}.service"
    file.write_text(text.replace("/opt/headrace/bin/headrace", sys.executable), encoding="utf-8")
    checked = subprocess.run([analyze, "verify", file], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    assert file.name not in checked.stderr  # a warning about this unit
    command = [analyze, "security", "--offline=true", "--threshold=20", file]  # of 100
    judged = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert judged.returncode == 0, judged.stdout[-300:]


@pytest.mark.parametrize("name", ["worker", "exporter", "gateway"])
def test_a_unit_that_fails_at_each_start_stops_after_some(name: str) -> None:
    parser = unit(f"headrace-{name}.service")
    seconds, most = (int(parser["Unit"][f"StartLimit{what}"]) for what in ("IntervalSec", "Burst"))
    assert most * (int(parser["Service"]["RestartSec"]) + 10) < seconds  # a failing start takes less than 10 s


def test_the_worker_unit_drains_before_it_is_killed() -> None:
    service = unit("headrace-worker.service")["Service"]
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")  # the engine must not get it
    assert int(service["TimeoutStopSec"]) > 30 + 5  # --grace-seconds, and the time for the last results


def test_the_worker_unit_lets_torch_list_network_interfaces_as_vllm_does_at_its_start() -> None:
    assert "AF_NETLINK" in unit("headrace-worker.service")["Service"]["RestrictAddressFamilies"].split()


def test_the_gateway_unit_has_time_for_open_answers_and_no_more_rights_than_the_others() -> None:
    service, exporter = unit("headrace-gateway.service")["Service"], unit("headrace-exporter.service")["Service"]
    assert service["KillMode"] == "mixed"  # the process for large bodies must not get SIGTERM
    assert int(service["TimeoutStopSec"]) > GatewaySettings().shutdown
    assert service["Environment"] == "HEADRACE_GATEWAY_KEYS=/etc/headrace/keys.toml"
    assert service["StateDirectoryMode"] == "0700"  # what callers upload lies there
    hardening = {name: value for name, value in exporter.items() if value in ("yes", "strict")}
    assert len(hardening) > 8
    assert {name: service.get(name) for name in hardening} == hardening
