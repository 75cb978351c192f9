"""Which failures of a load would be met again by the next try, and which may have passed by then.

The first kind becomes a ModelLoadError, which ends a worker at once and with a sentence; the other is passed on as it
is, and the engine process is started again.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from headrace_engine.errors import HeadraceEngineError, ModelLoadError

# Short of memory, descriptors or processes, or a disk or mount that does not answer now.
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
# As torch and safetensors say it, whose errors have no numbers.
_MAY_PASS_WORDS = ("memory", "unable to mmap", "can't start new thread", "i/o error", "input/output error", "cuda")


@contextmanager
def lasting_errors(
    model: str,
    verb: str,
    describe: Callable[[str, Exception], ModelLoadError] | None = None,
    *,
    what: str = "model",
) -> Iterator[None]:
    """Raise ModelLoadError for what another try would meet again.

    Its text is `<what> '...' cannot be <verb>: ...`, or what `describe` makes of transformers' own errors.
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
        # transformers' own sentences stand alone; "KeyError" or "OverflowError" says what kind of words follow
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
