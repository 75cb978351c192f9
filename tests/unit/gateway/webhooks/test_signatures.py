"""Other libraries verify our webhooks: standardwebhooks and openai."""

import base64
import time

import openai
import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.webhooks.event import EVENT_TYPES, Event
from headrace_gateway.webhooks.secret import new_secret, secret_bytes, signed_headers

BODY = Event("response.completed", "resp_1", 7, "web", None).body()


def headers_for(*secrets: str, body: bytes = BODY, at: int | None = None) -> dict[str, str]:
    keys = [key for secret in secrets if (key := secret_bytes(secret)) is not None]
    assert len(keys) == len(secrets)
    return signed_headers("evt_1", body, keys, at=int(time.time()) if at is None else at)


def openai_accepts(secret: str, headers: dict[str, str], body: bytes = BODY) -> bool:
    with openai.OpenAI(api_key="unused") as client:
        try:
            client.webhooks.verify_signature(body, headers, secret=secret)
        except openai.InvalidWebhookSignatureError:
            return False
    return True


def standard_accepts(secret: str, headers: dict[str, str], body: bytes = BODY) -> bool:
    try:
        standardwebhooks.Webhook(secret).verify(body, headers)
    except standardwebhooks.WebhookVerificationError:
        return False
    return True


def test_both_libraries_accept_a_signature() -> None:
    secret = new_secret()
    headers = headers_for(secret)
    assert standard_accepts(secret, headers)
    assert openai_accepts(secret, headers)


def test_while_a_secret_is_replaced_both_the_old_and_the_new_one_verify() -> None:
    old, new = new_secret(), new_secret()
    headers = headers_for(old, new)
    for secret in (old, new):
        assert standard_accepts(secret, headers)
        assert openai_accepts(secret, headers)
    assert not standard_accepts(new_secret(), headers)
    assert not openai_accepts(new_secret(), headers)


def test_a_changed_body_or_time_does_not_verify() -> None:
    secret = new_secret()
    assert not standard_accepts(secret, headers_for(secret), BODY + b" ")
    assert not openai_accepts(secret, headers_for(secret), BODY + b" ")
    old = headers_for(secret, at=int(time.time()) - 1000)
    assert not standard_accepts(secret, old)
    old["webhook-timestamp"] = str(int(time.time()))
    assert not standard_accepts(secret, old)


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_openai_unwraps_every_type_to_its_own_class(event_type: str) -> None:
    secret = new_secret()
    event = Event(event_type, "resp_1", 7, "web", "acme")
    with openai.OpenAI(api_key="unused", webhook_secret=secret) as client:
        unwrapped = client.webhooks.unwrap(event.body(), headers_for(secret, body=event.body()))
    assert unwrapped.type == event_type
    assert unwrapped.data.id == "resp_1"
    strict = type(unwrapped).model_validate_json(event.body(), strict=True)
    assert (strict.id, strict.object, strict.created_at) == (event.id, "event", 7)


def test_an_events_id_depends_on_the_change_alone_and_reveals_no_owner() -> None:
    event = Event("response.completed", "resp_1", 7, "web", "acme")
    assert event.id == Event("response.completed", "resp_1", 8, "web", "acme").id
    assert event.id != Event("response.failed", "resp_1", 7, "web", "acme").id
    assert event.id != Event("response.completed", "resp_2", 7, "web", "acme").id
    assert b"web" not in event.body()
    assert b"acme" not in event.body()


@given(st.binary(min_size=24, max_size=64))
def test_secrets_of_24_to_64_bytes_are_accepted(key: bytes) -> None:
    assert secret_bytes("whsec_" + base64.b64encode(key).decode()) == key


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        base64.b64encode(bytes(32)).decode(),
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        "whsec_" + base64.b64encode(bytes(32)).decode() + "\n",
        "whsec_ä",
        "WHSEC_" + base64.b64encode(bytes(32)).decode(),
    ],
)
def test_other_secrets_are_refused(secret: str) -> None:
    assert secret_bytes(secret) is None


def test_new_secrets_differ_and_are_accepted() -> None:
    assert len({new_secret() for _ in range(9)}) == 9
    assert len(secret_bytes(new_secret()) or b"") == 32
