"""Settings from arguments and the environment, and invalid values."""

from typing import Any

import pytest

from headrace_broker.errors import SettingsError
from headrace_broker.settings import DEFAULT_REDIS_URL, BrokerSettings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert BrokerSettings.from_env({}) == BrokerSettings(DEFAULT_REDIS_URL, 15, 600, 5)
    assert BrokerSettings.from_env({"HEADRACE_LEASE_SECONDS": " "}) == BrokerSettings()


def test_the_environment_is_read() -> None:
    settings = BrokerSettings.from_env(
        {
            "HEADRACE_REDIS_URL": "redis://queue:6380/3",
            "HEADRACE_LEASE_SECONDS": "2.5",
            "HEADRACE_RESULT_TTL_SECONDS": "60",
            "HEADRACE_DELIVERY_LIMIT": "2",
            "UNRELATED": "x",
        }
    )
    assert settings == BrokerSettings("redis://queue:6380/3", 2.5, 60, 2)


@pytest.mark.parametrize(("text", "value"), [("True", True), ("1", True), ("off", False), ("0", False)])
def test_a_boolean_is_read_from_a_word(text: str, value: bool) -> None:
    assert BrokerSettings.from_env({"HEADRACE_PREFIX_AFFINITY": text}).prefix_affinity is value


@pytest.mark.parametrize("grace", [-0.001, 1.001, float("nan"), True, "0.05"])
def test_a_prefix_grace_beyond_a_second_is_refused(grace: Any) -> None:
    rule = "prefix_grace must be a number of at least 0 and at most 1"
    with pytest.raises(SettingsError, match=f"^{rule}, got {grace!r}$"):
        BrokerSettings(prefix_grace=grace)


def test_the_prefix_grace_may_be_anything_up_to_a_second() -> None:
    assert [BrokerSettings(prefix_grace=grace).prefix_grace for grace in (0, 0.05, 1)] == [0, 0.05, 1]


def test_weights_of_tenants_are_read_from_one_line() -> None:
    settings = BrokerSettings.from_env({"HEADRACE_TENANT_WEIGHTS": "acme=4, a=b=0.5,"})
    assert settings.weights == {"acme": 4.0, "a=b": 0.5}


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        (
            {"HEADRACE_LEASE_SECONDS": "soon"},
            "must be a number of at least 0.1 and at most 3600, got 'soon'",
        ),
        ({"HEADRACE_RESULT_TTL_SECONDS": "1.5"}, "HEADRACE_RESULT_TTL_SECONDS must be an integer of at least 1"),
        (
            {"HEADRACE_LEASE_SECONDS": "nan"},
            "HEADRACE_LEASE_SECONDS must be a number .* got 'nan'",
        ),
        ({"HEADRACE_LEASE_SECONDS": "0"}, "HEADRACE_LEASE_SECONDS must be"),
        ({"HEADRACE_RESULT_TTL_SECONDS": "0"}, "HEADRACE_RESULT_TTL_SECONDS must be"),
        ({"HEADRACE_DELIVERY_LIMIT": "0"}, "HEADRACE_DELIVERY_LIMIT must be an integer of at least 1"),
        ({"HEADRACE_PREFIX_AFFINITY": "maybe"}, "HEADRACE_PREFIX_AFFINITY must be true or false, got 'maybe'"),
        (
            {"HEADRACE_PREFIX_GRACE": "1.5"},
            "HEADRACE_PREFIX_GRACE must be a number of at least 0 and at most 1, got '1.5'",
        ),
        ({"HEADRACE_PREFIX_GRACE": "-0.01"}, "HEADRACE_PREFIX_GRACE must be a number of at least 0 .* got '-0.01'"),
        ({"HEADRACE_PREFIX_GRACE": "nan"}, "HEADRACE_PREFIX_GRACE must be a number .* got 'nan'"),
        ({"HEADRACE_ORDER": "deadlines"}, "order must be arrival or deadline, got 'deadlines'"),
        ({"HEADRACE_AGEING_SECONDS": "-1"}, "HEADRACE_AGEING_SECONDS must be"),
        ({"HEADRACE_MAX_QUEUED_REQUESTS_PER_TENANT": "-1"}, "HEADRACE_MAX_QUEUED_REQUESTS_PER_TENANT must be"),
        ({"HEADRACE_TENANT_WEIGHTS": "acme"}, "tenant_weights must be comma-separated tenant=weight pairs"),
        ({"HEADRACE_TENANT_WEIGHTS": "acme=1,acme=2"}, "each tenant once"),
        ({"HEADRACE_TENANT_WEIGHTS": "acme=0"}, "the weight of 'acme' must be a number from 0.001 to 1000, not '0'"),
        ({"HEADRACE_TENANT_WEIGHTS": "acme=nan"}, "not 'nan'"),
        ({"HEADRACE_REDIS_URL": "http://queue"}, "redis_url must look like"),
        ({"HEADRACE_REDIS_URL": "queue:6379"}, "redis_url must look like"),
        ({"HEADRACE_REDIS_URL": "redis://"}, "redis_url must look like"),
        ({"HEADRACE_REDIS_URL": "redis://queue/zero"}, "by a number, not by 'zero'"),
    ],
)
def test_an_invalid_setting_is_refused(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        BrokerSettings.from_env(environ)


def test_the_password_is_never_shown() -> None:
    settings = BrokerSettings("redis://user:hunter2@queue:6379/1")
    assert "hunter2" not in repr(settings)
    assert settings.safe_url == "redis://queue:6379/1"
    with pytest.raises(SettingsError) as refusal:
        BrokerSettings("amqp://user:hunter2@queue")
    assert "hunter2" not in str(refusal.value)


def test_queue_urls_name_the_servers_of_queues() -> None:
    text = "chat=redis://a:1/0, b/c=sentinel://x:1,y:2/0?master=m ,here=redis://main/2"
    settings = BrokerSettings("redis://main/2", queue_urls=text)
    assert settings.url_by_queue == {
        "headrace.chat": "redis://a:1/0",
        "headrace.b/c": "sentinel://x:1,y:2/0?master=m",
    }
    assert BrokerSettings.from_env({"HEADRACE_QUEUE_URLS": "m=redis://a"}).url_by_queue == {"headrace.m": "redis://a/0"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (",", "queue_urls must be model=url pairs separated by commas, got ','"),
        (" ", "queue_urls must be model=url pairs separated by commas, got ''"),
        ("chat", "queue_urls must be model=url pairs separated by commas, got 'chat'"),
        ("redis://u:secret@h/0", r"queue_urls must be model=url pairs separated by commas, got 'redis://\.\.\.'"),
        ("=redis://h", "a model of queue_urls must be a printable string of 1 to 200 characters"),
        ("a=redis://h,a=redis://i", "queue_urls must name each model once, got 'a' twice"),
        ("a=amqp://u:secret@h", r"the URL of 'a' in queue_urls must look like .*, not amqp://\.\.\."),
        ("a=redis://h,b=x", r"the URL of 'a' in queue_urls must look like .*, not redis://\.\.\."),
        (
            "a=redis+cluster://h",
            "the URL of 'a' in queue_urls must name one server or its Sentinels, not a Redis Cluster",
        ),
    ],
)
def test_queue_urls_that_cannot_be_used_are_refused_with_the_value_and_the_rule(text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        BrokerSettings(queue_urls=text)
    assert "secret" not in str(refused.value)


def test_the_url_of_a_cluster_is_refused_with_the_limit_and_the_way_out() -> None:
    with pytest.raises(
        SettingsError, match=r"redis_url must .* not a Redis Cluster .*kombu.* HEADRACE_QUEUE_URLS .*STREAM_URLS"
    ):
        BrokerSettings("redis+cluster://u:secret@h:1/0")
