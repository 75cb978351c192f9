"""Every error this package raises."""


class HeadraceMonitoringError(Exception):
    """Base of all errors of headrace_monitoring."""


class HealthAddressError(HeadraceMonitoringError):
    """The health server cannot listen on its address."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot serve metrics and health on {host}:{port}: {reason}")


class TracingError(HeadraceMonitoringError):
    """Tracing was asked for, but a package that it needs is missing."""

    def __init__(self, module: str) -> None:
        super().__init__(f"tracing needs the extra headrace[tracing]: module {module} is missing")


class LogLevelError(HeadraceMonitoringError):
    """The log level is not one of the standard names."""

    def __init__(self, level: str, known: tuple[str, ...]) -> None:
        super().__init__(f"unknown log level {level!r}; use one of {', '.join(known)}")


class PrometheusError(HeadraceMonitoringError):
    """A Prometheus server does not answer, or refuses a query."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"the Prometheus at {url} does not answer: {reason}")
