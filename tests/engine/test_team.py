"""Threads that meet between the parts of a computation (`team.h`)."""

from __future__ import annotations

import ctypes
import subprocess
from importlib.resources import files

import pytest

from headrace_engine import openmp
from headrace_engine.runner import native_library

pytestmark = pytest.mark.torch

_MEMBERS_MEET = """
#include <string.h>
#include <sys/resource.h>

/* Each member writes the round's number and takes pieces of its work. Returns how often somebody saw after a meeting
 * that another one had not written it, or that not all pieces were taken. */
int failures(int threads, int spins, int rounds, int pieces) {
    seat seats[threads];
    team all = {.seats = memset(seats, 0, sizeof seats), .spins = spins};
    int written[threads], taken[threads], wrong = 0;
#pragma omp parallel num_threads(threads) reduction(+ : wrong)
    {
        const member own = join_team(&all);
        for (int round = 1; round <= rounds; round++) {
            written[own.thread] = round;
            taken[own.thread] = 0;
            for (int64_t piece = 0; piece < pieces;) {
#pragma omp atomic capture
                piece = all.claimed++;
                taken[own.thread] += piece < pieces;
            }
            meet(&own);
            int sum = 0;
            for (int thread = 0; thread < own.threads; thread++)
                wrong += written[thread] != round, sum += taken[thread];
            wrong += sum != pieces;
            meet(&own);
        }
    }
    return wrong;
}

/* Two threads on one core that meet. Returns how often they gave it away, or -1 where they may not be put there. */
long times_asleep(int rounds, int spins) {
    seat seats[2];
    team all = {.seats = memset(seats, 0, sizeof seats), .spins = spins};
    long asleep = 0;
    int refused = 0, core = sched_getcpu();
#pragma omp parallel num_threads(2) reduction(+ : asleep, refused)
    {
        cpu_set_t before, one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        refused += sched_getaffinity(0, sizeof before, &before) || sched_setaffinity(0, sizeof one, &one);
        struct rusage used, used_before;
        const member own = join_team(&all);
        getrusage(RUSAGE_THREAD, &used_before);
        for (int round = 0; round < rounds; round++) meet(&own);
        getrusage(RUSAGE_THREAD, &used);
        asleep += used.ru_nvcsw - used_before.ru_nvcsw;
        refused += sched_setaffinity(0, sizeof before, &before) != 0;
    }
    return refused ? -1 : asleep;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = files("headrace_engine.runner").joinpath("team.h").read_text() + _MEMBERS_MEET
    target = tmp_path_factory.mktemp("team") / "team.so"
    command = ["cc", *native_library._FLAGS, "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("spins", [0, 100, 5000])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_after_a_meeting_everything_that_others_did_before_is_done(
    library: ctypes.CDLL, threads: int, spins: int
) -> None:
    assert library.failures(threads, spins, 2000, 10) == 0


def test_a_thread_sleeps_at_once_where_the_one_that_it_waits_for_needs_its_core(library: ctypes.CDLL) -> None:
    library.times_asleep.restype = ctypes.c_long
    assert library.times_asleep(100, 2**31 - 1) >= 90


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [
        ({"GOMP_SPINCOUNT": "300"}, 300),
        ({"GOMP_SPINCOUNT": "99999999999"}, 2**31 - 1),
        ({"GOMP_SPINCOUNT": "INFINITE"}, 5000),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 0),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300"}, 300),
        ({}, 5000),
    ],
    ids=str,
)
def test_they_spin_as_long_as_the_operator_has_openmp_spin(chosen: dict[str, str], spins: int) -> None:
    assert openmp.spin_count(chosen) == spins
