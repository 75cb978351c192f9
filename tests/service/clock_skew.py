"""Processes whose clock is wrong: a library that is loaded before all others shifts the time of day alone."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t skew(void) {
    const char *seconds = getenv("TEST_CLOCK_SKEW_SECONDS");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += skew();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out) *out = precise.tv_sec;
    return precise.tv_sec;
}
"""


class ClockSkew:
    """Needs a C compiler, as the CPU kernel does."""

    def __init__(self, folder: Path) -> None:
        source, self._library = folder / "clock_skew.c", folder / "clock_skew.so"
        source.write_text(_SOURCE)
        compiler = shutil.which(os.environ.get("CC", "cc"))
        assert compiler is not None, "no C compiler was found (tried $CC, then cc)"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True)

    def environ(self, hours: float) -> dict[str, str]:
        """For a process whose clock is so far ahead."""
        return {"LD_PRELOAD": str(self._library), "TEST_CLOCK_SKEW_SECONDS": str(round(hours * 3600))}
