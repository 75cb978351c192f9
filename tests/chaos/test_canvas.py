"""A short seeded cut of `python -m chaos.canvas`."""

from pathlib import Path

import pytest

from chaos.canvas import run

pytestmark = pytest.mark.rotated_file


@pytest.mark.timeout(900)
@pytest.mark.parametrize("redis_kills", [0, 2])
def test_whatever_is_killed_every_callback_of_a_canvas_is_sent_once(redis_kills: int, tmp_path: Path) -> None:
    account = run(tmp_path, 3, chains=20, chords=2, size=10, worker_kills=2, redis_kills=redis_kills)
    assert account.problems == []
    assert (account.expected, account.worker_kills, account.redis_kills) == (22, 2, redis_kills)
