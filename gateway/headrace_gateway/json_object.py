"""`read_object`: parses JSON from outside that must be an object."""

from typing import Any, Final

import msgspec

from headrace_gateway.errors import invalid

_DECODER: Final = msgspec.json.Decoder()


def read_object(raw: bytes, name: str, code: str) -> dict[str, Any]:
    """Parse the object. Raises ApiError 400 with this code; `name` names the JSON in the message."""
    try:
        value = _DECODER.decode(raw)
    except RecursionError:
        raise invalid(f"the {name} is nested too deeply", code=code) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the {name} is not valid JSON: {error}", code=code) from None
    if not isinstance(value, dict):
        raise invalid(f"the {name} must be a JSON object", code=code)
    return value
