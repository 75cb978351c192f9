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
