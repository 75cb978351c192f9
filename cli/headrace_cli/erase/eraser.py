"""`Eraser`: cancels what a tenant has open, removes what is stored of it, and scans again."""

import shutil
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace_broker.client.client import Client
from headrace_broker.usage.ledger import rename_row
from headrace_cli.erase.servers import Servers
from headrace_cli.erase.tenant_scan import LISTS_OF_REQUESTS, Findings, TenantScan, Trace
from headrace_gateway.batch.store import CANCEL, CLAIMS
from headrace_gateway.files.stored_files import owner_of
from headrace_gateway.redis.keys import batch_key, tokens_key

ERASED: Final = "(erased)"
"""The tenant and the key of the rows of the ledger that erased tenants had. Their sums stay."""
_LOOK_SECONDS: Final = 0.5


@dataclass(slots=True)
class Erasure:
    """What was removed, and what a second scan has still found."""

    removed: Counter[str] = field(default_factory=Counter)
    """Number of keys, members or folders by kind."""
    left: list[str] = field(default_factory=list)
    """Redis keys and folders, with the error of a folder that could not be removed."""


class Eraser:
    """Redis's errors pass through.

    Args:
        client: cancels requests.
        files: the gateway's folder of files; None if it has none.
        key_names: names of API keys of the tenant that may have files, besides those that Redis knows.
        foreign: see `TenantScan`.
    """

    def __init__(
        self,
        servers: Servers,
        client: Client,
        tenant: str,
        files: Path | None,
        key_names: Collection[str] = (),
        foreign: Collection[str] | None = None,
    ) -> None:
        self._servers: Final = servers
        self._client: Final = client
        self._tenant: Final = tenant
        self._files: Final = files
        self._names: Final = set(key_names)
        self._foreign: Final = foreign

    def find(self, known: Findings | None = None) -> Findings:
        """Scan all servers. `known`: of an earlier scan."""
        known = known or Findings(key_names=self._names)
        return TenantScan(self._servers, self._tenant, owner_of, known, self._foreign).run()

    def cancel(self, found: Findings, seconds: float) -> Findings:
        """Cancel what is open, and wait until it has ended, at most `seconds`. Return what is found then."""
        deadline = time.monotonic() + seconds
        while found.is_open and time.monotonic() < deadline:
            for batch_id in found.open_batches:
                keys = CANCEL.keys(batch=batch_key(batch_id), tokens=tokens_key(CLAIMS))
                self._servers.main.register_script(CANCEL.text)(keys=keys, args=[int(time.time()), batch_id])
            for request_id in found.open_requests - {"?"}:
                self._client.cancel(request_id)
            time.sleep(_LOOK_SECONDS)
            found.requests |= found.open_requests
            found = self.find(found)
        return found

    def erase(self, found: Findings) -> Erasure:
        """Remove what was found, and scan again.

        What names other data is removed after that data. So after a failure midway, a second run finds the rest.
        """
        erasure = Erasure()
        errors: dict[Path, OSError] = {}
        for folder in self._folders(found):
            try:
                shutil.rmtree(folder)
                erasure.removed["folders of files"] += 1
            except OSError as error:
                errors[folder] = error
        lists = [trace for trace in found.traces if trace.kind == LISTS_OF_REQUESTS]
        for trace in reversed(found.traces):
            if trace.kind != LISTS_OF_REQUESTS:
                erasure.removed[trace.kind] += _remove(trace)
        for row in () if errors else found.rows:  # they name the folders
            erasure.removed[row.kind] += rename_row(row.server, row.key, row.member or b"", ERASED)
        for trace in lists:
            erasure.removed[trace.kind] += _remove(trace)
        left = self.find(found)
        erasure.left = [trace.key for trace in (*left.traces, *left.rows)]
        erasure.left += [f"{folder}: {errors.get(folder, 'it exists')}" for folder in self._folders(left)]
        return erasure

    def _folders(self, found: Findings) -> list[Path]:
        folders = [] if self._files is None else [self._files / owner for owner in sorted(found.owners)]
        return [folder for folder in folders if folder.exists()]


def _remove(trace: Trace) -> int:
    server, key, member = trace.server, trace.key, trace.member
    if member is None:
        removed: Any = server.delete(key)
        return int(removed)
    kind: Any = server.type(key)
    if kind == b"zset":
        removed = server.zrem(key, member)
    elif kind == b"hash":
        removed = server.hdel(key, member)
    else:
        removed = server.lrem(key, 1, member)  # type: ignore[arg-type]
    return int(removed)
