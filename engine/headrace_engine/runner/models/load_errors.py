"""Tells permanent failures of a load from temporary ones.

A permanent failure becomes a ModelLoadError, which ends a worker at once with its message. A temporary one is raised as
it is, and the engine process is restarted.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from headrace_engine.errors import HeadraceEngineError, ModelLoadError

# Shortage of memory, descriptors or processes, or a disk or mount that does not respond.
_MAY_PASS = {
    errno.EAGAIN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
# Words in the messages of torch and safetensors, whose errors have no error numbers.
_MAY_PASS_WORDS = ("memory", "unable to mmap", "can't start new thread", "i/o error", "input/output error", "cuda")


@contextmanager
def permanent_errors(
    model: str,
    verb: str,
    describe: Callable[[str, Exception], ModelLoadError] | None = None,
    *,
    what: str = "model",
) -> Iterator[None]:
    """Raise ModelLoadError for permanent failures.

    The message is `<what> '...' cannot be <verb>: ...`, or for errors of transformers the message of `describe`.
    """
    try:
        yield
    except HeadraceEngineError:
        raise
    except Exception as error:
        if _may_pass(error):
            raise
        if describe is not None and isinstance(error, (OSError, ValueError, ImportError)):
            raise describe(model, error) from error
        # messages of transformers are complete sentences; a KeyError, for example, has only the key
        kind = "" if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: "
        raise ModelLoadError(f"{what} {model!r} cannot be {verb}: {kind}{error}") from error


def _may_pass(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _MAY_PASS
    if isinstance(error, (RuntimeError, SafetensorError)):
        return any(word in str(error).lower() for word in _MAY_PASS_WORDS)
    return False
