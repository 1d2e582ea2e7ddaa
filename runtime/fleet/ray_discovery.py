"""The engines that Ray runs, for a gateway: a process of its own asks Ray for them, and ends with the gateway.

A process that is connected to Ray ends a minute after Ray's head has. The gateway does not: it keeps its engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from runtime.fleet.ray_cluster import FleetError, connect
from runtime.fleet.ray_roster import find_roster
from runtime.gateway.fleet.discovery import Listing
from runtime.gateway.fleet.plan import FleetPlan
from runtime.wire.address import read_key
from tapeout.errors import one_line

ASK_SECONDS = 0.5  # between two questions
OLD_SECONDS = 10.0  # an answer that is older counts no more
FIRST_SECONDS = 60.0  # until the first answer
AGAIN_SECONDS = 5.0  # after which a process that has ended is started again


class RayDiscovery:
    """A :class:`runtime.gateway.fleet.discovery.Discovery`."""

    def __init__(self, plan: FleetPlan, key: Path | None) -> None:
        self._plan, self._key_file = plan, key
        self._process: subprocess.Popen[str] | None = None
        self._started = -AGAIN_SECONDS
        self._engines: tuple[str, ...] | None = None
        self._answered = 0.0

    def read(self) -> Listing:
        key = read_key(self._key_file)
        end = monotonic() + (FIRST_SECONDS if self._engines is None else 0)
        while True:
            self._ask()
            if self._engines is not None and monotonic() - self._answered < OLD_SECONDS:
                return Listing(self._engines, key)
            if monotonic() > end:
                raise FleetError(
                    "Ray does not say which engines there are", expected=f"a fleet named {self._plan.name}"
                )
            sleep(0.1)

    def _ask(self) -> None:
        """Have a process that does."""
        if self._process is not None and self._process.poll() is None:
            return
        if (now := monotonic()) - self._started < AGAIN_SECONDS:
            return
        self._started = now
        command = [sys.executable, "-m", "runtime.fleet.ray_discovery", self._plan.model_dump_json()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def _listen(self, lines: Any) -> None:
        for line in lines:
            self._engines, self._answered = tuple(json.loads(line)), monotonic()


def main() -> None:
    """Of ``python -m runtime.fleet.ray_discovery PLAN``: a line of JSON, again and again, until standard input ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Ray prints on the standard output what goes wrong in the cluster, such as a head that has died.
    told, sys.stdout = sys.stdout, sys.stderr
    plan = FleetPlan.model_validate_json(sys.argv[1])
    try:
        ray = connect(plan)
    except FleetError as error:
        sys.exit(one_line(error))
    roster = None
    while True:
        roster = roster or find_roster(plan.name)
        if roster is not None:
            try:
                addresses = ray.get(roster.addresses.remote(), timeout=OLD_SECONDS)
            except ray.exceptions.RayError as error:
                sys.exit(f"the roster of {plan.name} does not answer: {one_line(error)}")
            if addresses is not None:
                print(json.dumps(addresses), file=told, flush=True)
        sleep(ASK_SECONDS)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
