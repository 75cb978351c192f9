"""Names in Redis are a public contract: these are literal on purpose."""

from kombu.transport import redis as kombu_redis

from headrace_broker import keys


def test_the_names_in_redis_do_not_change() -> None:
    assert keys.queue_name("m") == "headrace.m"
    assert keys.stream_key("r") == "headrace:stream:r"
    assert keys.ended_key("r") == "headrace:ended:r"
    assert keys.result_key("r") == "celery-task-meta-r"
    assert keys.MODELS_KEY == "headrace:models"
    assert keys.dead_letters_key("headrace.m") == "headrace:dead:headrace.m"
    assert keys.queue_lists("headrace.m") == [
        "headrace.m",
        "headrace.m\x06\x163",
        "headrace.m\x06\x166",
        "headrace.m\x06\x169",
    ]


def test_priority_lists_have_kombus_names() -> None:
    assert kombu_redis.Channel.sep == keys.PRIORITY_SEPARATOR
    assert tuple(kombu_redis.PRIORITY_STEPS) == keys.PRIORITY_STEPS
