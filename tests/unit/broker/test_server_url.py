"""`ServerUrl`: every form of the queue's address, its normalised spelling, and invalid URLs."""

from pathlib import Path

import pytest

from headrace_broker.app import make_app
from headrace_broker.errors import SettingsError
from headrace_broker.server.connections import address_of, connect
from headrace_broker.server.url import ServerUrl
from headrace_broker.settings import BrokerSettings


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("redis://queue", "redis://queue/0"),
        ("redis://user:pass@queue:7000/3", "redis://user:pass@queue:7000/3"),
        ("redis://queue?db=3", "redis://queue/3"),
        ("redis://queue/2147483647", "redis://queue/2147483647"),
        ("redis://queue/0000000000000003", "redis://queue/3"),
        ("rediss://queue/1", "rediss://queue/1?ssl_cert_reqs=required"),
        ("rediss://queue/1?ssl_cert_reqs=CERT_NONE", "rediss://queue/1?ssl_cert_reqs=none"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock?db=0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        ("unix://user:pass@/run/redis.sock", "unix://user:pass@/run/redis.sock?db=0"),
        ("redis+socket:///run/redis.sock?virtual_host=2", "unix:///run/redis.sock?db=2"),
        ("sentinel://a,b:5000/1?master=m", "sentinel://a,b:5000/1?master=m"),
        ("sentinels://a?master=m", "sentinels://a/0?master=m&ssl_cert_reqs=required"),
    ],
)
def test_every_form_is_normalised_to_a_url_that_parses_again(given: str, understood: str) -> None:
    assert ServerUrl.parse(given).text == understood
    assert ServerUrl.parse(understood).text == understood


def test_sentinels_are_listed_with_commas() -> None:
    server = ServerUrl.parse("sentinel://user:p%40ss@a:1,b,[::1]:3/4?master=mill&sentinel_password=secret")
    assert server.hosts == (("a", 1), ("b", 26379), ("::1", 3))
    assert (server.master, server.db, server.username, server.password) == ("mill", 4, "user", "p@ss")
    assert server.sentinel_options == {"password": "secret"}
    assert server.connection_options == {"db": 4, "username": "user", "password": "p@ss"}


def test_with_tls_the_sentinels_use_tls_too(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    server = ServerUrl.parse(f"sentinels://a/0?master=m&ssl_ca_certs={ca}&ssl_check_hostname=False")
    tls = {"ssl": True, "ssl_ca_certs": str(ca), "ssl_cert_reqs": "required", "ssl_check_hostname": False}
    assert server.sentinel_options == tls
    assert server.connection_options == {"db": 0, "username": None, "password": None, **tls}


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://queue", "must look like"),
        ("redis://queue/one", "by a number, not by 'one'"),
        ("redis://queue/2147483648", "by a number up to 2147483647, not by '2147483648'"),
        ("redis://queue/99999999999", "by a number up to 2147483647"),
        pytest.param(f"unix:///run/redis.sock?db={'9' * 5000}", "not by '99999999999999999999'", id="long database"),
        ("redis://queue:99999/0", "an invalid host or port"),
        ("redis://queue:port/0", "an invalid host or port"),
        ("redis://[::1/0", "an invalid host or port"),
        ("redis://queue/1?db=2", "two databases"),
        ("redis://queue/0?ssl_ca_certs=/ca.pem", "ssl_ca_certs, which need TLS"),
        ("rediss://queue/0?ssl_ca_cert=/ca.pem", "unknown TLS options ssl_ca_cert;"),
        ("rediss://queue/0?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs must name an existing file.*ca.pem'"),
        ("rediss://queue/0?ssl_certfile=/nowhere/c.pem", "ssl_certfile must name an existing file"),
        ("rediss://queue/0?ssl_cert_reqs=maybe", "ssl_cert_reqs must be required, optional or none, not 'maybe'"),
        ("rediss://queue/0?ssl_check_hostname=perhaps", "must be true or false"),
        ("unix://run/redis.sock", "by an absolute path"),
        ("unix://", "by an absolute path"),
        ("unix:///run/redis.sock?db=x", "by a number"),
        ("sentinel://a:1,b:2/0", "must name the master"),
        ("sentinel://a:1,/0?master=m", "host:port,host:port, not ''"),
        ("redis://queue/0?socket_time_out=3", "unknown options: socket_time_out; known are client_name"),
        ("unix:///run/redis.sock?colour=red", "unknown options: colour; known are client_name"),
        ("sentinel://a:1;sentinel://b:2/0?master=m", "host:port,host:port"),
        ("sentinel://a:1/0?master=m&quorum=2", "unknown options: quorum"),
        ("sentinel:///0?master=m", "must look like"),
    ],
)
def test_an_invalid_url_is_refused_with_the_reason(url: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ServerUrl.parse(url)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis://queue/0?password=hunter2", r"as an option: write redis://user:password@host:port/db"),
        ("redis://u:hunter2@queue/0?username=hunter2", "as an option"),
        ("rediss://queue/0?password=hunter2&db=1", "as an option"),
        ("unix:///run/redis.sock?password=hunter2", "as an option"),
        ("sentinel://a:1/0?master=m&password=hunter2", "as an option"),
        ("redis://u:7#hunter2@queue/0", "a # or a / in its password.* %23"),
        ("redis://u:hunter2#x@queue/0", "an invalid host or port; in a password"),
        ("redis://u:7/hunter2@queue/0", "a # or a / in its password.* %2F"),
        ("redis://u:hunter2/x@queue/0", "an invalid host or port"),
        ("redis://u:7?hunter2=x@queue/0", "unknown options; known"),
        ("redis://u:7?Hunter2=&x=@queue/0", "unknown options"),
        ("sentinel://u:hunter2/x@a:1/0?master=m", "a # or a / in its password"),
    ],
)
def test_a_password_in_a_wrong_place_is_refused_and_not_shown(url: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint) as error:
        ServerUrl.parse(url)
    assert "hunter2" not in str(error.value).lower()
    assert error.value.__cause__ is None


def test_an_encoded_password_may_have_any_characters() -> None:
    assert ServerUrl.parse("redis://u:%40%3A%2F%3F%23%25@queue/0").password == "@:/?#%"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:hunter2@queue/1", "redis://queue/1"),
        ("unix://u:hunter2@/run/redis.sock", "unix:///run/redis.sock"),
        ("sentinel://u:hunter2@a:1,b:2/0?master=m&sentinel_password=hunter2", "sentinel://a:1,b:2/0?master=m"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    server = ServerUrl.parse(url)
    assert server.safe == shown
    assert "hunter2" not in repr(server)
    app = make_app(BrokerSettings(url), worker=True, models=["m"])
    with app.connection_for_read() as connection:
        assert "hunter2" not in connection.as_uri()


def test_sentinels_of_two_masters_of_one_name_are_two_servers() -> None:
    """The order of the Sentinels does not matter."""
    urls = ("sentinel://b,a:5000/0?master=m", "sentinel://a:5000,b/0?master=m", "sentinel://c/0?master=m")
    assert [address_of(connect(url)) for url in urls] == ["m@a:5000", "m@a:5000", "m@c:26379"]
