"""Threads that wait for each other at a barrier (`team.h`)."""

from __future__ import annotations

import ctypes
import os
import subprocess
from importlib.resources import files

import pytest

from headrace_engine.runner.native import native_library
from headrace_engine.system import openmp

_MEMBERS_AT_BARRIERS = """
#include <string.h>
#include <sys/resource.h>

static int may_run_on(const cpu_set_t *cores) {
    cpu_set_t now;
    return !sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(cores, &now);
}

/* Within 20 seconds: the thread that moves it may not be scheduled for some time. */
static int is_free_at_last(const cpu_set_t *cores) {
    for (int turn = 0; turn < 20000 && !may_run_on(cores); turn++) usleep(1000);
    return may_run_on(cores);
}

/* Each member writes the round's number and takes pieces of its work. Returns how often a member saw after a barrier
 * that another one had not written it, or that not all pieces were taken, or was left bound to other cores. */
int failures(int threads, int spins, int rounds, int pieces, int moved) {
    team_slot slots[threads];
    team all = {.slots = memset(slots, 0, sizeof slots), .spins = spins};
    if (moved) all.movable = movable_threads(threads);
    int written[threads], taken[threads], wrong = 0;
    cpu_set_t cores;
    sched_getaffinity(0, sizeof cores, &cores);
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
            barrier(&own);
            int sum = 0;
            for (int thread = 0; thread < own.threads; thread++)
                wrong += written[thread] != round, sum += taken[thread];
            wrong += sum != pieces;
            barrier(&own);
        }
        leave_team(&own);
        wrong += !is_free_at_last(&cores);
    }
    return wrong;
}

/* Two threads that wait at barriers on one core. Returns how often they gave it away, or -1 if they cannot be moved. */
long times_asleep(int rounds, int spins) {
    team_slot slots[2];
    team all = {.slots = memset(slots, 0, sizeof slots), .spins = spins};
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
        for (int round = 0; round < rounds; round++) barrier(&own);
        getrusage(RUSAGE_THREAD, &used);
        asleep += used.ru_nvcsw - used_before.ru_nvcsw;
        refused += sched_setaffinity(0, sizeof before, &before) != 0;
    }
    return refused ? -1 : asleep;
}

/* Does not run, but for moments, until it is moved. Returns the core where it is then, from 1; 0 after 20 seconds. */
static int32_t wait_until_moved(movable_thread *p, _Atomic int *waits) {
    atomic_store(waits, 1);
    for (int turn = 0; turn < 1000; turn++) {
        if (atomic_load(&p->state) == MIGRATED) return current_core();
        usleep(20000);
    }
    return 0;
}

static int32_t stay_on_core(void) {
    int32_t core = current_core();
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core - 1, &one);
    return sched_setaffinity(0, sizeof one, &one) ? -1 : core;
}

/* The second of two threads does not run when the first one waits for it, before it has joined the team or later.
 * Returns whether it was taken to the first one's core, and both may run anywhere in the end. */
int takes_the_missing_one(int before_it_joins) {
    cpu_set_t cores;
    sched_getaffinity(0, sizeof cores, &cores);
    int32_t waiting = 0, found = 0, free = 0;
    _Atomic int waits = 0;
    for (int round = 0; round < 2; round++) { /* in the first one they become known, and ask no helper */
        team_slot slots[2];
        team all = {.slots = memset(slots, 0, sizeof slots), .movable = movable_threads(2), .spins = round ? 5000 : 0};
#pragma omp parallel num_threads(2) reduction(+ : free)
        {
            int missing = round == 1 && omp_get_thread_num() == 1;
            if (missing && before_it_joins) found = wait_until_moved(own_thread(), &waits);
            const member own = join_team(&all);
            if (missing) atomic_store(&all.slots[1].core, 0); /* or a helper is asked, where both are on one core */
            if (missing && !before_it_joins) found = wait_until_moved(own.self, &waits);
            while (round == 1 && own.thread == 0 && !atomic_load(&waits)) usleep(1000);
            if (round == 1 && own.thread == 0) waiting = stay_on_core();
            barrier(&own);
            if (round == 1 && own.thread == 0) sched_setaffinity(0, sizeof cores, &cores);
            leave_team(&own);
            free += is_free_at_last(&cores);
        }
    }
    return found > 0 && found == waiting && free == 4 && !migrate_to(own_thread(), waiting, 1);
}

typedef struct {
    movable_thread *_Atomic self;
    int32_t core, found;
    int free;
    _Atomic int waits;
    cpu_set_t cores;
} sharer;

static void *share(void *argument) {
    sharer *s = argument;
    movable_thread *own = own_thread();
    allow_migration(own);
    atomic_store(&s->self, own);
    s->found = wait_until_moved(own, &s->waits);
    forbid_migration(own);
    s->free = is_free_at_last(&s->cores);
    return NULL;
}

/* Two threads are on one core as far as they know. Returns whether one is fetched by another core, and then is free. */
int leaves_the_shared_core(void) {
    pthread_t thread;
    sharer s = {0};
    sched_getaffinity(0, sizeof s.cores, &s.cores);
    movable_thread *own = own_thread();
    pthread_create(&thread, NULL, share, &s); /* before this one is bound, which it would inherit */
    s.core = stay_on_core();
    atomic_store(&own->core, s.core);
    while (!atomic_load(&s.self)) usleep(1000);
    atomic_store(&s.self->core, s.core);
    movable_thread *_Atomic movable[] = {own, s.self};
    for (int turn = 0; turn < 20000 && !s.found; turn++) {
        request_idle_core(s.self, own, movable, 2);
        usleep(1000);
    }
    pthread_join(thread, NULL);
    sched_setaffinity(0, sizeof s.cores, &s.cores);
    return s.found > 0 && s.found != s.core && s.free;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    headers = (files("headrace_engine.runner.native").joinpath(name).read_text() for name in ("cores.h", "team.h"))
    source = "\n".join(headers) + _MEMBERS_AT_BARRIERS
    target = tmp_path_factory.mktemp("team") / "team.so"
    command = ["cc", *native_library._FLAGS, "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("spins", [0, 100, 5000])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_after_a_meeting_everything_that_others_did_before_is_done(
    library: ctypes.CDLL, threads: int, spins: int, moved: bool
) -> None:
    assert library.failures(threads, spins, 2000, 10, moved) == 0


def test_a_thread_sleeps_at_once_where_the_one_that_it_waits_for_needs_its_core(library: ctypes.CDLL) -> None:
    library.times_asleep.restype = ctypes.c_long
    assert library.times_asleep(100, 2**31 - 1) >= 90


_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")


@_two_cores
@pytest.mark.parametrize("before_it_joins", [True, False])
def test_a_thread_that_does_not_run_is_taken_to_the_core_of_the_one_that_waits_for_it(
    library: ctypes.CDLL, before_it_joins: bool
) -> None:
    assert library.takes_the_missing_one(before_it_joins)


@_two_cores
def test_one_of_two_threads_on_a_core_is_fetched_by_another_core(library: ctypes.CDLL) -> None:
    assert library.leaves_the_shared_core()


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
