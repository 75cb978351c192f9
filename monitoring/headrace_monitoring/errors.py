"""All exceptions of this package."""

from headrace_wire.errors import CopyableError


class HeadraceMonitoringError(CopyableError):
    """Base class of the exceptions of headrace_monitoring."""


class HealthAddressError(HeadraceMonitoringError):
    """The health server cannot listen on its address."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot serve metrics and health on {host}:{port}: {reason}")


class TracingError(HeadraceMonitoringError):
    """Tracing is enabled, but a package that it needs is not installed."""

    def __init__(self, module: str) -> None:
        super().__init__(f"tracing needs the extra headrace[tracing]: module {module} is not installed")


class LogLevelError(HeadraceMonitoringError):
    """The log level is not one of the accepted names."""

    def __init__(self, level: str, known: tuple[str, ...]) -> None:
        super().__init__(f"the log level must be one of {', '.join(known)}, got {level!r}")
