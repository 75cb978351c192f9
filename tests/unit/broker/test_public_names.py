"""The public names of headrace_broker, which are loaded on first use."""

import headrace_broker


def test_dir_lists_the_public_names() -> None:
    assert set(headrace_broker.__all__) <= set(dir(headrace_broker))
    for name in headrace_broker.__all__:
        assert getattr(headrace_broker, name) is not None
