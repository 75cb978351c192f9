"""Secrets and signatures of Standard Webhooks 1.0.0: HMAC-SHA256 over id, timestamp and body."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final

PREFIX: Final = "whsec_"
_LEAST_BYTES: Final = 24
_MOST_BYTES: Final = 64
FORM: Final = f"{PREFIX} and the base64 of {_LEAST_BYTES} to {_MOST_BYTES} bytes"


def new_secret() -> str:
    """Return a secret of 32 random bytes."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def secret_bytes(secret: str) -> bytes | None:
    """Return the HMAC key; None if the secret is not in the format FORM."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if secret.startswith(PREFIX) and _LEAST_BYTES <= len(key) <= _MOST_BYTES else None


def signed_headers(event_id: str, body: bytes, keys: Sequence[bytes], *, at: int) -> dict[str, str]:
    """Return the three headers of an attempt.

    Args:
        keys: one signature is made with each, so that the receiver may have any of them.
        at: Unix seconds of the attempt.
    """
    signed = f"{event_id}.{at}.".encode() + body
    digests = (hmac.digest(key, signed, hashlib.sha256) for key in keys)
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(at),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }
