"""The exceptions of the worker side.

HeadraceWorkerError
├── FailedRequestError    the failure of a request, as the results of later tasks and the errors of chords show it
└── WorkerSettingsError   an environment variable or flag is wrong
"""

from headrace_wire.errors import CopyableError


class HeadraceWorkerError(CopyableError):
    """Base class of all errors that the worker package raises deliberately."""


class FailedRequestError(HeadraceWorkerError):
    """The failure of a request that others depend on. It is stored as the result of the rest of its chain."""


class WorkerSettingsError(HeadraceWorkerError, ValueError):
    """A setting is invalid. The message names it, its value and the allowed values."""
