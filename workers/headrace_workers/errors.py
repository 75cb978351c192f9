"""The exceptions of the worker side.

HeadraceWorkerError
└── WorkerSettingsError   an environment variable or flag is wrong
"""


class HeadraceWorkerError(Exception):
    """Base class of all errors that the worker package raises deliberately."""


class WorkerSettingsError(HeadraceWorkerError, ValueError):
    """A setting is invalid. The message names it, its value and the allowed values."""
