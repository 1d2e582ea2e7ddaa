"""What calibration samples are between two layers, in files, so that memory does not grow with the text.

S  tokens of a sample     C  hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from tapeout.layer_stream import CarriedStates, LayerState
from tapeout.work_folder import discard, is_kept, keep


class HiddenStates:
    """States of every sample after ``layer`` layers. A layer's states take the place of those before it as a whole.

    ``folder`` may hold those of an interrupted run over samples of the same ``lengths``; then that run is continued,
    unless its file is damaged.
    """

    def __init__(self, folder: Path, lengths: Sequence[int]) -> None:
        self._folder = folder
        self._starts = [0, *accumulate(lengths)]  # tokens before each sample
        kept = sorted(folder.glob("hidden-???"))
        self.layer = int(kept[-1].name.removeprefix("hidden-")) if kept else 0
        self._carried: list[CarriedStates] = [{} for _ in lengths]
        self._next: list[CarriedStates] = []
        if not (is_kept(self._path()) and is_kept(self._path(".carried"))):
            self.start_again()
        else:
            self._carried = torch.load(self._path(".carried"))

    def start_again(self) -> None:
        """Before the first layer."""
        for path in self._folder.glob("hidden-*"):
            path.unlink()
        self.layer, self._carried = 0, [{} for _ in self._carried]

    def read(self, sample: int) -> LayerState:
        """State of a sample before the current layer."""
        if not self.layer:
            return LayerState()
        first, last = self._starts[sample : sample + 2]
        channels = self._path().stat().st_size // (4 * self._starts[-1])
        array = np.fromfile(self._path(), np.float32, (last - first) * channels, offset=first * channels * 4)
        return LayerState(torch.from_numpy(array).reshape(1, last - first, channels), self._carried[sample])

    def write(self, state: LayerState) -> None:
        """State of the next sample after the current layer."""
        assert state.hidden is not None
        with self._path(".partial", 1).open("ab" if self._next else "wb") as file:
            state.hidden.numpy().tofile(file)
        self._next.append(state.carried)

    def advance(self) -> None:
        """The current layer is finished."""
        before = self._path(), self._path(".carried")
        torch.save(self._next, self._path(".partial-carried", 1))
        keep(self._path(".partial-carried", 1), self._path(".carried", 1))
        keep(self._path(".partial", 1), self._path("", 1))
        self.layer, self._carried, self._next = self.layer + 1, self._next, []
        for path in before:
            discard(path)

    def _path(self, suffix: str = "", layers_later: int = 0) -> Path:
        return self._folder / f"hidden-{self.layer + layers_later:03d}{suffix}"
