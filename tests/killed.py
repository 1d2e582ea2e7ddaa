"""Functions at which a process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def killed_after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but the call after so many sends SIGKILL to its own process: nothing of it can clean up."""
    left = count

    def run(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    return run
