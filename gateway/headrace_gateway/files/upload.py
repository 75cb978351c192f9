"""`UploadForm`: parses a multipart body with one file as it arrives. The file's bytes are passed on, not stored."""

import re
from collections.abc import Callable
from typing import Final

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import GatewayCode
from headrace_wire.values import named

FORM_BYTES: Final = 65_536
"""Bytes that a form may have besides the file."""
MAX_FILENAME: Final = 255
_MAX_VALUE: Final = 256
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 86_400
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class UploadForm:
    """Feed it the body with `write`, fetch the file's bytes with `take`, and call `finish` at the end.

    All methods raise ApiError 400 with the problem.

    Args:
        content_type: Content-Type of the request. Raises ApiError 415 if it is not that of a form.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data":
            message = f"the content type must be multipart/form-data, got {kind.decode('latin-1')[:60]!r}"
            raise ApiError(415, "invalid_request_error", GatewayCode.UNSUPPORTED_MEDIA_TYPE, message)
        if not options.get(b"boundary"):
            raise _broken("the content type names no boundary")
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser: Final = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        except ValueError as error:
            raise _broken(str(error)) from None
        self._header_name, self._header_value = b"", b""
        self._disposition = b""
        self._field: str | None = None
        """Name of the current part's field; None: the part is the file."""
        self._data: list[bytes] = []
        self._value = b""
        self._num_other_bytes = 0
        self.has_ended = False
        self._values: Final[dict[str, str]] = {}
        self.filename: str | None = None

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _broken(str(error)) from None

    def take(self) -> bytes:
        """Return the file's bytes since the last call."""
        data, self._data = b"".join(self._data), []
        return data

    def finish(self) -> tuple[str, str, int | None]:
        """Return the file's name, its purpose, and the seconds for which it is kept."""
        if not self.has_ended:
            raise _broken("it ends before its last boundary")
        problems = Problems()
        if self.filename is None:
            problems.add("file", "the form must have exactly one file, got none")
        purpose = self._values.get("purpose")
        if purpose != "batch":
            problems.add(
                "purpose",
                f"purpose must be batch, got {named(purpose)}: files are used only by batches",
                GatewayCode.UNSUPPORTED_VALUE,
            )
        anchor, text = (self._values.get(name) for name in _FIELDS[1:])
        if anchor not in (None, "created_at") or (anchor is None) != (text is None):
            problems.add(
                "expires_after[anchor]",
                f"expires_after must have the anchor created_at, and seconds, got {named(anchor)}",
            )
        seconds = int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None
        if text is not None and not LEAST_SECONDS <= (seconds or 0) <= MOST_SECONDS:
            message = (
                f"expires_after[seconds] must be an integer from {LEAST_SECONDS} to {MOST_SECONDS}, got {text[:20]!r}"
            )
            problems.add("expires_after[seconds]", message)
        problems.raise_any()
        assert self.filename is not None
        return self.filename, "batch", seconds

    def _begin_part(self) -> None:
        self._disposition, self._value, self._field = b"", b"", None

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += self._bounded(data[start:end])

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += self._bounded(data[start:end])

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name, self._header_value = b"", b""

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise _broken("a part has no Content-Disposition with a name")
        if name == "file":
            if self.filename is not None:
                raise invalid("the form must have exactly one file, got several", param="file")
            if b"filename" not in options:
                raise invalid("file must be sent as a file, with a filename", param="file")
            self.filename = _shown_name(options[b"filename"].decode("utf-8", "replace"))
            self._field = None
            return
        if name not in _FIELDS:
            raise invalid(f"unknown field {name[:64]!r}", code=GatewayCode.UNSUPPORTED_PARAMETER, param=name[:64])
        if name in self._values:
            raise invalid(f"{name} is given twice", param=name)
        self._field = name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._data.append(data[start:end])
            return
        self._value += self._bounded(data[start:end])
        if len(self._value) > _MAX_VALUE:
            raise invalid(f"{self._field} must be at most {_MAX_VALUE} bytes", param=self._field)

    def _end_part(self) -> None:
        if self._field is not None:
            self._values[self._field] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.has_ended = True

    def _bounded(self, data: bytes) -> bytes:
        self._num_other_bytes += len(data)
        if self._num_other_bytes > FORM_BYTES:
            raise _broken(f"it has more than {FORM_BYTES} bytes besides the file")
        return data


def _broken(reason: str) -> ApiError:
    return invalid(f"the body is not a valid multipart form: {reason}", code=GatewayCode.INVALID_FORM)


def _shown_name(given: str) -> str:
    """Return the file name without its folders, and without characters that cannot be displayed."""
    name = _CONTROL.sub("", re.split(r"[/\\]", given)[-1]).strip()
    return name[-MAX_FILENAME:] or "upload"
