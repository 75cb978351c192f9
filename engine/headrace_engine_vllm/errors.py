"""Converts vLLM's exceptions to messages and errors of Headrace."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.exceptions import VLLMValidationError

from headrace_engine.errors import ConfigError, HeadraceEngineError, ModelLoadError

_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
"""Messages of torch's CPU allocator and of vLLM's ranks. Their exceptions have no type of their own."""
_REFUSALS = (TypeError, ValueError, NotImplementedError, VLLMValidationError)
"""pydantic's errors are ValueErrors. So were vLLM's own until 0.31."""
_MAY_PASS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def sentence_of(error: BaseException) -> str:
    """Return the message of an error in one line. From pydantic's errors, leave out the counts and links."""
    problems = getattr(error, "errors", None)
    if callable(problems) and type(error).__name__ == "ValidationError":
        found = [str(problem.get("msg", "")).removeprefix("Value error, ").strip() for problem in problems()]
        names = [".".join(str(part) for part in problem.get("loc", ())) for problem in problems()]
        text = "; ".join(f"{name}: {says}" if name else says for name, says in zip(names, found, strict=True))
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


def refusal_of(error: Exception) -> str:
    """Return the message for the client of a request. An unexpected error is named with its type."""
    sentence = sentence_of(error)
    return sentence if isinstance(error, (*_REFUSALS, HeadraceEngineError)) else f"{type(error).__name__}: {sentence}"


@contextmanager
def startup_errors(model: str, verb: str) -> Iterator[None]:
    """Raise ConfigError or ModelLoadError for errors that a retry would meet again. Other errors pass unchanged.

    Args:
        verb: what vLLM fails to do, as in "vLLM <verb>: ...".
    """
    try:
        with memory_errors():
            yield
    except HeadraceEngineError:
        raise
    except _REFUSALS as error:
        raise ConfigError(f"vLLM {verb}: {sentence_of(error)}") from error
    except AssertionError as error:
        if not str(error):
            raise
        raise ConfigError(
            f"vLLM {verb}: {sentence_of(error)}"
        ) from error  # some of its checks of options are assertions
    except OSError as error:
        if error.errno in _MAY_PASS:
            raise
        raise ModelLoadError(f"vLLM cannot load model {model!r}: {sentence_of(error)}") from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise ModelLoadError(f"vLLM cannot load model {model!r}: {sentence_of(error)}") from error
        raise


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError for a RuntimeError whose message reports a lack of memory."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if type(error).__name__ != "OutOfMemoryError" and any(words in text for words in _MEMORY):
            raise MemoryError(sentence_of(error)) from error
        raise
