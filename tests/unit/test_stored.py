"""Quantized checkpoints: what is sound is read exactly; any one defect is refused, or the weights are still exact."""

from __future__ import annotations

import copy
import itertools
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.export.checkpoint import load_checkpoint
from quantization.checkpoint_formats import autoawq, compressed
from quantization.stored import quantized_modules
from tapeout.errors import QuantizationError, TapeoutError
from tapeout.mapped_weights import widened
from tapeout.tensor_files import stored_tensors
from tests.checkpoints import CONFIG, WEIGHTS, Tensors, change_json
from tests.mutations import MUTATIONS, Mutation
from tests.stored_formats import EXAMPLES

# No weight here is square: a square one that is transposed is another model, in no way a damaged file.
PARTS_OF = ("mlp.up_proj", "mlp.down_proj", "self_attn.k_proj", "mlp.experts")
MODULES = tuple(f"model.layers.1.{name}" for name in PARTS_OF)


@cache
def sound(example: str) -> tuple[Path, Tensors, Tensors]:
    """A folder, what it stores, and the weights."""
    folder = Path(tempfile.mkdtemp()) / "checkpoint"
    stored, weights = EXAMPLES[example].write(folder)
    return folder, stored, weights


def assert_exact(folder: Path, weights: Tensors) -> None:
    parameters = dict(load_checkpoint(folder).model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, weight in weights.items():
        with widened([parameters[name]]):  # what stays codes is decoded here
            assert torch.equal(parameters[name].float(), weight.float()), name


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_sound_checkpoint_is_read_exactly(example: str) -> None:
    folder, _, weights = sound(example)
    assert_exact(folder, weights)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_defect_is_refused_or_the_weights_are_exact(mutation: Mutation, data: st.DataObject) -> None:
    example = data.draw(st.sampled_from(sorted(EXAMPLES)))
    folder, stored, weights = sound(example)
    tensors, config = dict(stored), copy.deepcopy(dict(EXAMPLES[example].config))
    quantized = [name for name in stored if name.rpartition(".")[0] in MODULES and name not in weights]
    mutation(data.draw, tensors, data.draw(st.sampled_from(quantized)), config)
    save_file(tensors, folder / WEIGHTS)
    change_json(folder / CONFIG, quantization_config=config)
    try:
        assert_exact(folder, weights)
    except TapeoutError as error:
        assert error.expected or error.remedy
    finally:
        save_file(stored, folder / WEIGHTS)
        change_json(folder / CONFIG, quantization_config=dict(EXAMPLES[example].config))


@pytest.mark.parametrize("name", ["attn.logit_scales", "attn.relative_blocks", "attn.weight"])
def test_a_parameter_in_float_is_no_part_of_a_quantized_weight(name: str, tmp_path: Path) -> None:
    """Whatever its name ends with: what ends with ``_scales`` are scales of MXFP4 where they are bytes."""
    for dtype, found in ((torch.float32, 0), (torch.uint8, 1)):
        save_file({name: torch.ones(4, dtype=dtype)}, tmp_path / WEIGHTS)
        assert len(quantized_modules(stored_tensors(tmp_path))) == found


def test_the_most_specific_target_of_config_groups_holds() -> None:
    """In whatever order they stand: a name, a regular expression, a class."""
    targets = {"Linear": 4, "re:.*down_proj$": 5, "model.layers.1.mlp.down_proj": 8}
    groups = [
        {"targets": [target], "weights": {"num_bits": bits, "strategy": "channel"}} for target, bits in targets.items()
    ]
    for order in itertools.permutations(groups):
        config = {"format": "pack-quantized", "config_groups": {str(at): group for at, group in enumerate(order)}}
        found = [compressed.declared(f"model.layers.{name}", config).bits for name in ("0.q", "0.mlp.down_proj")]
        assert found == [4, 5] and compressed.declared("model.layers.1.mlp.down_proj", config).bits == 8


@pytest.mark.parametrize("value", [False, None, 0, "true"])
def test_awq_without_zero_points_is_refused(value: object) -> None:
    with pytest.raises(QuantizationError, match="zero_point") as caught:
        autoawq.declared("q_proj", {"bits": 4, "zero_point": value})
    assert "zero_point: true" in caught.value.expected
