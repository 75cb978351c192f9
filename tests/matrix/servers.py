"""The Redis servers that this machine has, by name and version."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from service.servers import OLD_VALKEY, REDIS, VALKEY


def installed_servers() -> dict[str, str]:
    """Return the programs by `Redis 7.0` or `Valkey 8.1`. `make ops-tools` gets those that can be had."""
    found = {}
    for program in (REDIS, str(OLD_VALKEY), VALKEY):
        if program is None or not Path(program).exists():
            continue
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        match = re.search(r"v=(\d+\.\d+)", shown)
        kind = "Valkey" if "valkey" in shown.lower() else "Redis"
        found[f"{kind} {match.group(1) if match else '?'}"] = program
    return found
