"""The two forms in which Prometheus reads metrics, and which of them a scrape gets.

OpenMetrics alone carries exemplars: the id of a trace beside a bucket of a histogram. It is what Prometheus asks for
first; a reader that does not name it gets the plain text that everything understands.
"""

from __future__ import annotations

import enum

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics


class ExpositionFormat(enum.Enum):
    """The value is the content type of an answer."""

    TEXT = CONTENT_TYPE_LATEST
    OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST

    @classmethod
    def asked_for(cls, accept: str) -> ExpositionFormat:
        """OpenMetrics where the header `Accept` names a version 1 of it, text otherwise."""
        for entry in accept.lower().split(","):
            media_type, *pairs = (part.strip() for part in entry.split(";"))
            parameters = {name: value.strip('"') for name, _, value in (pair.partition("=") for pair in pairs)}
            version, weight = parameters.get("version", "1"), parameters.get("q", "1")
            refused = weight.strip("0.") == ""  # "q=0" means: anything but this
            if media_type == "application/openmetrics-text" and version.partition(".")[0] == "1" and not refused:
                return cls.OPENMETRICS
        return cls.TEXT


def render(registry: CollectorRegistry, form: ExpositionFormat) -> bytes:
    """Everything in the registry, as Prometheus reads it."""
    if form is ExpositionFormat.OPENMETRICS:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return text
    return generate_latest(registry)
