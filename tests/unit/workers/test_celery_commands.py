"""A worker shows its settings without passwords, wherever the server's URL has them."""

import json
from types import SimpleNamespace

import pytest

from headrace_broker.app import make_app
from headrace_broker.settings import BrokerSettings
from headrace_workers.celery.commands import conf, report


@pytest.mark.parametrize(
    "url",
    [
        "redis://boss:Zanzibar@localhost:6379/0",
        "redis://:Zanzibar@localhost:6379/0",
        "rediss://boss:Zanzibar@localhost:6379/0",
        "unix://boss:Zanzibar@/run/redis.sock?db=0",
        "sentinel://boss:Zanzibar@h1:26379,h2:26379/0?master=m&sentinel_password=Zanzibar",
    ],
)
def test_settings_are_shown_without_passwords(url: str) -> None:
    app = make_app(BrokerSettings(redis_url=url), worker=True, models=["m"])
    state = SimpleNamespace(app=app)
    told = json.dumps([conf(state), conf(state, with_defaults=True), report(state)])
    assert "Zanzibar" not in told
    assert "headrace.m" in told
    assert "celery:" in report(state)["ok"]
