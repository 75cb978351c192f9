"""The child process of engine vllm: `python -m headrace_engine_vllm.child READ_FD WRITE_FD`."""

import os
import sys
import warnings
from typing import TYPE_CHECKING

from headrace_engine.core.serving import Core, run
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine_vllm.environment import prepare
from headrace_engine_vllm.log_lines import guard_logs
from headrace_engine_vllm.versions import check_version

if TYPE_CHECKING:
    from headrace_engine_vllm.core import VLLMCore


def _make_core(config: EngineConfig) -> Core:
    prepare(config, os.environ)
    logs = guard_logs()
    warnings.simplefilter("ignore", FutureWarning)  # about how vLLM uses torch
    version, core_type = _import_vllm()
    core: VLLMCore = core_type(config, version)
    core.warm_up()
    logs.is_serving = True
    return core


def _import_vllm() -> "tuple[str, type[VLLMCore]]":
    """Import vLLM, which reads the environment at its import. Return its version and the core.

    Raises:
        ImportError: vLLM is not installed.
        ConfigError: the version is not supported, or a package that vLLM needs cannot be imported.
    """
    try:
        from vllm.version import __version__ as version

        check_version(version, os.environ)
        from headrace_engine_vllm.core import VLLMCore
    except (ImportError, ConfigError):
        raise
    except Exception as error:  # such as torch's error for a package that was built for another torch
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"vLLM cannot be imported by {sys.executable} ({type(error).__name__}: {reason}): repair that "
            "environment, or give another one as engine_python"
        ) from error
    return version, VLLMCore


if __name__ == "__main__":
    status = run(_make_core, int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # does not wait for threads of vLLM and OpenMP
