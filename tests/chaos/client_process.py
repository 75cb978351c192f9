"""`ClientProcess`: a producer and subscriber with the client of some version, in a process of its own."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from headrace_broker.server.embedded import die_with_parent

PROGRAM = """
import json, sys, threading
from headrace_broker import Client
from headrace_broker.errors import QueueUnavailableError

client, lock = Client(sys.argv[1], model="tiny"), threading.Lock()

def tell(**message):
    with lock:
        print(json.dumps(message), flush=True)

def read(request_id):
    last_id, choices, error = "0-0", {}, None
    while last_id is not None:
        try:
            for event in client.events(request_id, last_id=last_id, timeout=300):
                last_id = event.entry_id
                if hasattr(event, "token_ids"):
                    choices.setdefault(event.index, []).extend(event.token_ids)
                elif hasattr(event, "usage"):
                    last_id, error = None, event.error and event.error.code
        except QueueUnavailableError:  # the server was killed, and is back soon
            continue
        except Exception as problem:
            last_id, error = None, f"{type(problem).__name__}: {problem}"
    tell(request_id=request_id, choices=choices, error=error)

for line in sys.stdin:
    options = json.loads(line)
    tell(sent=client.submit(**options))
    threading.Thread(target=read, args=(options["request_id"],), daemon=True).start()
"""


class ClientProcess:
    """Sends requests, and reads their streams.

    Args:
        url: of the queue's server.
        environ: in which Python finds the code of the version.
    """

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._told = threading.Condition()
        self._sent: set[str] = set()
        self._read: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._listen, name="client process", daemon=True).start()

    def submit(self, request_id: str, **options: Any) -> None:
        """Send a request and wait until it is in the queue."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"request_id": request_id, **options}) + "\n")
        self._process.stdin.flush()
        with self._told:
            assert self._told.wait_for(lambda: request_id in self._sent, 60), "the client did not send the request"

    def read(self, request_id: str, timeout: float) -> dict[int, list[int]]:
        """Return the tokens of each choice, as the client has read them."""
        with self._told:
            assert self._told.wait_for(lambda: request_id in self._read, timeout), "the client did not read the end"
            read = self._read.pop(request_id)
        assert read["error"] is None, f"the client read the error {read['error']}"
        return {int(index): token_ids for index, token_ids in read["choices"].items()}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._told:
                if "sent" in message:
                    self._sent.add(message["sent"])
                else:
                    self._read[message["request_id"]] = message
                self._told.notify_all()
