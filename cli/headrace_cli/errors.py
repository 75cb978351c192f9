"""The exceptions of commands.

HeadraceCommandError
├── DemoFailedError     a check of the demo failed
├── PortTakenError      the gateway cannot listen on its address
└── ProcessStartError   a worker or gateway on this machine did not start
"""

from headrace_wire.errors import CopyableError


class HeadraceCommandError(CopyableError):
    """Base class of all errors that the command package raises deliberately."""


class DemoFailedError(HeadraceCommandError):
    """A check of the demo failed."""


class PortTakenError(HeadraceCommandError):
    """The gateway cannot listen on its address, often because another program does."""


class ProcessStartError(HeadraceCommandError):
    """The process ended, or was not ready in time; the message has the end of its log."""
