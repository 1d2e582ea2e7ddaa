"""The benchmark of what Python adds to a step runs what it says; its stand-in takes the time that it is told."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

from benchmarks import steps_ahead
from benchmarks.steps_ahead import TimedDevice, added_us
from engines.kernels.cuda.library import DeviceStep
from engines.targets.cuda.engine import CudaEngine


def test_steps_of_the_stand_in_take_their_time_one_after_the_other() -> None:
    device, empty = TimedDevice(0.01), np.zeros(1, np.int32)
    step = DeviceStep(empty.astype(np.int64), empty.astype(np.int64), None, empty, empty, empty, 0, 1, 1, 1)
    start = time.thread_time()
    ends = [device.begin(step, ranking=False, logits=False) for _ in range(2)]
    for number, end in enumerate(ends, start=1):
        assert end().tokens.tolist() == [steps_ahead.TOKEN]
        assert time.thread_time() - start >= 0.01 * number


@pytest.mark.parametrize("at_once", [1, 2])
def test_all_streams_are_in_every_step(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, follow, packed = list[int](), list[int](), CudaEngine.begin

    def counted(self: CudaEngine, batch: object) -> object:
        begun.append(len(batch))  # type: ignore[arg-type]
        follow.append(sum(entry.follows is not None for entry in batch))  # type: ignore[attr-defined]
        return packed(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaEngine, "begin", counted)
    added_us(1e-5, 3, 10, at_once)
    assert begun[-1] == 3 and follow[-1] == (3 if at_once == 2 else 0)


def test_what_is_added_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["steps_ahead", "--step-ms", "1", "--streams", "2", "--rounds", "1"])
    for added, code in ((steps_ahead.BAR_US - 1, 0), (steps_ahead.BAR_US + 1, 1)):
        monkeypatch.setattr(steps_ahead, "added_us", lambda *_, added=added: added)
        assert steps_ahead.main() == code
