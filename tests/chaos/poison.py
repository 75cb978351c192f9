"""A request that ends the engine process which computes it, whichever engine that is."""

import os
from pathlib import Path
from typing import Final

TOKENS: Final = [13, 13, 13]

# Loaded by every interpreter that finds it: the next step behind the poison ends an engine's child.
_KILLER: Final = """
import os, sys

if any(word in sys.orig_argv for word in ("headrace_engine.core.child", "headrace_engine_vllm.child")):
    from headrace_engine.core import serving

    run = serving.run

    def run_until_poisoned(make_core, read_fd, write_fd):
        def make(config):
            core = make_core(config)
            add_request, step, poison = core.add_request, core.step, []

            def add(message):
                poison.extend([message.request_id] * (getattr(message, "prompt_token_ids", None) == [13, 13, 13]))
                add_request(message)

            def step_or_die():
                if poison:
                    os._exit(3)
                return step()

            core.add_request, core.step = add, step_or_die
            return core

        return run(make, read_fd, write_fd)

    serving.run = run_until_poisoned
"""


def environ(folder: Path) -> dict[str, str]:
    """For workers whose engines the poison is to end."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_KILLER)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
