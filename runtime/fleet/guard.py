"""``python -m runtime.fleet.guard PARENT COMMAND…`` becomes the command, which is killed when its parent dies.

Ray ends the children of a worker that was killed, but not when a node's own process (raylet) has died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; it outlasts an exec


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that was asked for
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
