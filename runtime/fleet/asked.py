"""What is asked of a fleet on Ray, by a process of its own that is killed where Ray does not answer in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from runtime.fleet.deployed import DeployedFleet, connected
from runtime.fleet.ray_cluster import FleetError, connect
from runtime.gateway.fleet.plan import FleetPlan
from runtime.wire.failures import Failure
from tapeout.errors import TapeoutError, one_line

ANSWER_SECONDS = 60.0  # twice what a start of Ray's own process takes on a busy machine, and the roster's time


class SilentRayError(FleetError):
    """Ray has not answered in time."""


def ask(plan: FleetPlan, question: str, *arguments: Any, seconds: float | None = None) -> Any:
    """``question``: a method of :class:`DeployedFleet`; it returns what JSON holds.

    :class:`SilentRayError` after ``seconds``, by default :data:`ANSWER_SECONDS`; what was asked for may have been done
    then.
    """
    seconds = ANSWER_SECONDS if seconds is None else seconds
    command = [
        *(sys.executable, "-m", "runtime.fleet.guard", str(os.getpid())),
        *(sys.executable, "-m", "runtime.fleet.asked", plan.model_dump_json(), question, json.dumps(arguments)),
    ]
    try:  # its standard error is read, too: Ray writes there what it tries again
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SilentRayError(
            f"Ray has not answered for {seconds:g} seconds",
            expected="a head and a controller of Ray Serve that answer",
            remedy="look at the cluster (`ray status`), and try again: requests are answered meanwhile",
        ) from error
    try:
        answer = json.loads(found.stdout)
    except ValueError as error:
        last = one_line(FleetError(found.stderr[-500:]))
        raise FleetError(f"the process that asks Ray has ended with {found.returncode}: {last}") from error
    if "failure" in answer:
        raise Failure(*answer["failure"]).error()
    return answer["found"]


def main() -> None:
    """Of ``python -m runtime.fleet.asked PLAN QUESTION ARGUMENTS``: a line of JSON on the standard output."""
    plan, question, arguments = FleetPlan.model_validate_json(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    try:
        with connected():
            connect(plan)
            answer = {"found": getattr(DeployedFleet(plan), question)(*arguments)}
    except TapeoutError as error:
        answer = {"failure": Failure.of(error)}
    except Exception as error:  # of any kind: Ray has many
        failure = FleetError(f"Ray does not answer: {type(error).__name__}: {one_line(error)}")
        answer = {"failure": Failure.of(failure)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
