"""The exceptions of the worker side.

HeadraceWorkerError
└── WorkerSettingsError   an environment variable or flag is wrong
"""


class HeadraceWorkerError(Exception):
    """Base of all errors that the worker package raises on purpose."""


class WorkerSettingsError(HeadraceWorkerError, ValueError):
    """A setting cannot be used; the message names it, its value and what is allowed."""
