"""A clock of the day that steps when a test says so, for processes with :attr:`SteppedClock.variables`.

As when somebody sets it, or a time server does. CLOCK_MONOTONIC and CLOCK_BOOTTIME are not changed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long step(void) {
  char text[32] = {0};
  const int file = open(getenv("CLOCK_STEP_FILE"), O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const long size = read(file, text, sizeof text - 1);
  close(file);
  return size > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += step();
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec found;
  const int result = clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return result;
}

time_t time(time_t* now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


class SteppedClock:
    """``folder``: for the library and the step."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        library, source = folder / "clock.so", folder / "clock.c"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self._step = folder / "step"
        self.variables: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_STEP_FILE": str(self._step)}
        self.set(0)

    def set(self, seconds: int) -> None:
        """From now on it is so many seconds ahead of the machine's."""
        part = self._step.with_suffix(".part")
        part.write_text(f"{seconds}\n")
        part.replace(self._step)
