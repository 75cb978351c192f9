"""The webhook file: its fields, and the errors of an invalid one."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace_gateway.errors import GatewaySettingsError
from headrace_gateway.webhooks.endpoint_file import Endpoint, read_endpoints
from headrace_gateway.webhooks.event import EVENT_TYPES, Event
from headrace_gateway.webhooks.secret import new_secret, secret_bytes

SECRET, OTHER = new_secret(), new_secret()
URL = "https://hooks.example.org/h?token=hidden"


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Mapping[str, Endpoint]]:
    def read(text: str) -> Mapping[str, Endpoint]:
        path = tmp_path / "webhooks.toml"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o640)
        return read_endpoints(path)

    return read


Read = Callable[[str], Mapping[str, Endpoint]]


def entry(name: str = "a", url: str = URL, *lines: str, secret: str = f'"{SECRET}"') -> str:
    return "\n".join(["[[endpoints]]", f'name = "{name}"', f'url = "{url}"', f"secret = {secret}", *lines, ""])


def test_an_endpoint_has_what_the_file_says(read: Read) -> None:
    rest = ['tenant = "acme"', 'keys = ["web"]', 'types = ["batch.failed"]', "allow_private = true"]
    found = read(
        entry() + entry("b", "http://[fd00::1]:8080/", "allow_http = true", *rest, secret=f'["{SECRET}", "{OTHER}"]')
    )
    first, second = secret_bytes(SECRET), secret_bytes(OTHER)
    assert first is not None and second is not None
    assert found == {
        "a": Endpoint("a", URL, (first,)),
        "b": Endpoint(
            "b",
            "http://[fd00::1]:8080/",
            (first, second),
            "acme",
            frozenset({"web"}),
            frozenset({"batch.failed"}),
            True,
        ),
    }
    assert "whsec" not in repr(found)
    assert "hidden" not in repr(found)
    assert repr(first) not in repr(found)


def test_an_endpoint_gets_only_its_subscribed_events(read: Read) -> None:
    lines = ['tenant = "acme"', 'keys = ["web", "app"]', 'types = ["batch.failed"]']
    narrow, wide = read(entry("narrow", URL, *lines) + entry("wide")).values()
    wanted = Event("batch.failed", "batch_1", 1, "web", "acme")
    assert narrow.wants(wanted)
    for type_, key, tenant in (
        *(("batch.completed", "web", "acme"), ("batch.failed", "other", "acme")),
        *(("batch.failed", "web", None), ("batch.failed", "web", "rival")),
    ):
        event = Event(type_, "batch_1", 1, key, tenant)
        assert not narrow.wants(event)
        assert wide.wants(event)
    assert all(wide.wants(Event(type_, "x", 1, "k", None)) for type_ in EVENT_TYPES)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"has no \[\[endpoints\]\]"),
        ("endpoints = 1", r"has no \[\[endpoints\]\]"),
        ("endpoints = [1]", "endpoint 1: Expected `object`"),
        ("[[endpoints]", "at line 1"),
        (entry() + "[rest]\n", "unknown field 'rest'"),
        ('[[endpoints]]\nname = "a"\n', "line 1: Object missing required field `url`"),
        (entry() + "\n" + entry("b", URL, "port = 1"), "line 6: Object contains unknown field `port`"),
        (entry("b", URL, "allow_http = 1"), r"line 1: Expected `bool`, got `int` - at `\$.allow_http`"),
        (entry("a b"), "line 1: name must be"),
        (entry() + entry(), "line 5: two endpoints have the name a"),
        (entry(url="http://hooks.example.org/"), "line 1: url must begin with https://; allow_http = true"),
        *(
            (entry(url=url), "url must be https:// with a host")
            for url in ("ftp://a.b/", "hooks.example.org", "https:///a")
        ),
        (entry(url="https://user:hidden@a.example/"), "must not contain a user name or a password"),
        (entry(url="https://@a.example/"), "must not contain a user name or a password"),
        (entry(url="https://a.example/#hidden"), "must not contain a fragment"),
        (entry(url="https://a.example:99999/"), "url is not a valid URL"),
        (entry(url="https://a.example:0/"), "url must be https:// with a host"),
        (entry(url="https://[::1/"), "url is not a valid URL"),
        (entry(url="https://a.example/ä"), "printable ASCII"),
        (entry(url="https://a.example/a b"), "printable ASCII"),
        (entry(url="https://a.example/" + "a" * 2048), "1 to 2048"),
        (entry(url="https://127.0.0.1/"), "127.0.0.1 is a private address; allow_private = true"),
        (entry("a", "https://[fe80::1]/", "allow_private = true"), "fe80::1 is a special-purpose address"),
        (
            entry("a", "https://169.254.169.254/", "allow_private = true"),
            "169.254.169.254 is a special-purpose address",
        ),
        (entry(url="https://2130706433/"), "is not an IP address"),
        *(
            (entry(secret=s), "secret must be whsec_ and the base64 of 24")
            for s in ('"hidden"', "[]", '["whsec_hidden"]')
        ),
        (entry(secret=f'["{SECRET}", "{OTHER}", "{SECRET}"]'), "a list of at most 2 such"),
        (entry("a", URL, 'tenant = "no such\\nname"'), "tenant must be"),
        (entry("a", URL, "keys = []"), "keys must be a list of the names of API keys"),
        (entry("a", URL, 'keys = ["a b"]'), "keys must be a list of the names of API keys"),
        (entry("a", URL, "types = []"), "types must be a list of response.completed, "),
        (entry("a", URL, 'types = ["response.done"]'), "types must be a list of response.completed, "),
    ],
)
def test_an_invalid_file_is_reported_with_line_and_problem(read: Read, text: str, sentence: str) -> None:
    with pytest.raises(GatewaySettingsError, match=sentence) as raised:
        read(text)
    assert "hidden" not in str(raised.value)
    assert SECRET not in str(raised.value)


def test_one_error_lists_all_problems(read: Read) -> None:
    with pytest.raises(GatewaySettingsError) as raised:
        read(entry("a b", "https://a@b.example/", "types = []") + entry("c", secret='""'))
    for problem in ("line 1: name", "line 1: url", "line 1: types", "line 6: secret"):
        assert problem in str(raised.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o646, 0o602])
def test_a_file_that_every_user_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "webhooks.toml"
    path.write_text(entry())
    path.chmod(mode)
    with pytest.raises(GatewaySettingsError, match=f"mode {mode:04o}.: chmod o= "):
        read_endpoints(path)
    path.chmod(0o660)
    assert set(read_endpoints(path)) == {"a"}
