"""The child process of engine vllm: `python -m headrace_engine_vllm.child READ_FD WRITE_FD`."""

import os
import sys
import warnings

from headrace_engine.checkpoints.pooling_folder import read_pooling_spec
from headrace_engine.core.pooling_core import PoolingCore
from headrace_engine.core.serving import Core, run
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine_vllm.environment import prepare
from headrace_engine_vllm.log_lines import guard_logs
from headrace_engine_vllm.versions import check_version


def _make_core(config: EngineConfig) -> Core:
    prepare(config, os.environ)
    logs = guard_logs()
    warnings.simplefilter("ignore", FutureWarning)  # about how vLLM uses torch
    version = _import_vllm()
    core: Core = _core_of(config, version)
    logs.is_serving = True
    return core


def _core_of(config: EngineConfig, version: str) -> Core:
    if read_pooling_spec(config.model.model) is not None:
        from headrace_engine_vllm.pooling.runner import VLLMPoolingRunner

        return PoolingCore(config, VLLMPoolingRunner(config, version))
    from headrace_engine_vllm.core import VLLMCore

    core = VLLMCore(config, version)
    core.warm_up()
    return core


def _import_vllm() -> str:
    """Import vLLM, which reads the environment at its import. Return its version.

    Raises:
        ImportError: vLLM is not installed.
        ConfigError: the version is not supported, or a package that vLLM needs cannot be imported.
    """
    try:
        from vllm.version import __version__ as version

        check_version(version, os.environ)
        import headrace_engine_vllm.startup  # noqa: F401  # imports all of vLLM that is needed
    except (ImportError, ConfigError):
        raise
    except Exception as error:  # such as torch's error for a package that was built for another torch
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"vLLM cannot be imported by {sys.executable} ({type(error).__name__}: {reason}): repair that "
            "environment, or give another one as engine_python"
        ) from error
    return version


if __name__ == "__main__":
    status = run(_make_core, int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # does not wait for threads of vLLM and OpenMP
