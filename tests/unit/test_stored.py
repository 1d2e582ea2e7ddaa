"""Quantized checkpoints: what is sound is read exactly, and what a defect would make of it is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.export.checkpoint import load_checkpoint
from tests.stored_formats import EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_sound_checkpoint_is_read_exactly(name: str, tmp_path: Path) -> None:
    _, weights = EXAMPLES[name].write(tmp_path / "checkpoint")
    parameters = dict(load_checkpoint(tmp_path / "checkpoint").model.named_parameters())
    assert parameters.keys() == weights.keys()
    for parameter, weight in weights.items():
        assert torch.equal(parameters[parameter], weight.float()), parameter
