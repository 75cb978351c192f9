"""`PodDeletionCost`: tells Kubernetes which worker's pod loses the least work when it is removed.

When a Deployment gets fewer replicas, Kubernetes first removes the pods whose annotation
`controller.kubernetes.io/pod-deletion-cost` is lowest.
"""

import http.client
import json
import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Self

import structlog

from headrace_workers.errors import WorkerSettingsError

logger = structlog.get_logger(__name__)

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
INTERVAL_SECONDS: Final = 15.0
"""Each change is a write to Kubernetes's store, so a cost is not written more often."""
_MOST: Final = 2**31 - 1
_TIMEOUT_SECONDS: Final = 10.0


class PodDeletionCost:
    """Writes the cost of this process's pod, in a thread of its own.

    Until a write succeeds, one warning says why the last one failed. The next call of `update` tries again.

    Args:
        url: of the pod at Kubernetes's API.
        folder: has the files of the pod's service account.
    """

    def __init__(self, url: str, folder: Path = ACCOUNT_FOLDER) -> None:
        self.url = url
        self._folder = folder
        self._costs: SimpleQueue[int | None] = SimpleQueue()
        self._written: int | None = None
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="pod-deletion-cost", daemon=True)

    @classmethod
    def of_this_pod(cls, folder: Path = ACCOUNT_FOLDER) -> Self:
        """Raises WorkerSettingsError if this process does not run in a pod that has a service account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (folder / "token").is_file():
            raise WorkerSettingsError(
                "HEADRACE_POD_DELETION_COST needs a pod with the token of a service account: KUBERNETES_SERVICE_HOST is"
                f" {host!r}, the token would be {folder / 'token'}"
            )
        namespace, name = (folder / "namespace").read_text().strip(), os.environ.get("POD_NAME", socket.gethostname())
        address = f"[{host}]" if ":" in host else host
        return cls(f"https://{address}:{port}/api/v1/namespaces/{namespace}/pods/{name}", folder)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after what is to be written."""
        self._costs.put(None)

    def join(self) -> None:
        self._thread.join()

    def update(self, cost: int) -> None:
        """Write the cost soon, unless it is that of the last write. Call it once in INTERVAL_SECONDS."""
        self._costs.put(min(cost, _MOST))

    def _run(self) -> None:
        while (cost := self._costs.get()) is not None:
            if cost == self._written:
                continue
            try:
                self._patch(cost)
            except (OSError, ValueError, http.client.HTTPException) as error:  # urllib's own errors are OSErrors
                if not self._has_warned:
                    logger.warning("the pod's deletion cost could not be written", error=str(error), url=self.url)
                self._has_warned = True
            else:
                self._written, self._has_warned = cost, False

    def _patch(self, cost: int) -> None:
        body = json.dumps({"metadata": {"annotations": {ANNOTATION: str(cost)}}}).encode()
        token = (self._folder / "token").read_text().strip()  # Kubernetes replaces it within the hour
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
        request = urllib.request.Request(self.url, body, headers, method="PATCH")  # noqa: S310  # our own URL
        certificates = self._folder / "ca.crt"
        context = ssl.create_default_context(cafile=certificates) if self.url.startswith("https:") else None
        # without a proxy: those of the environment are for addresses outside of the cluster
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=_TIMEOUT_SECONDS):
            pass
