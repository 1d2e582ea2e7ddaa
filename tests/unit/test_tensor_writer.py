"""Safetensors files that are written tensor by tensor, read by the safetensors package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tapeout.tensor_files import INDEX, SINGLE
from tapeout.tensor_writer import ELEMENT_BYTES, ShardWriter, write_tensors

ONE_FILE = 1 << 62

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I8": torch.int8}
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    tensors=st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6),
    shard_bytes=st.sampled_from([1, 100, ONE_FILE]),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("written")
    values = {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(DTYPES[d])
        for name, (d, shape) in tensors.items()
    }
    writer = ShardWriter(folder, shard_bytes=shard_bytes)
    for name, value in values.items():
        if value.dtype == torch.bfloat16:
            writer.add(name, value.view(torch.uint16).numpy(), "BF16")
        else:
            writer.add(name, value.numpy())
    writer.finish()
    index = folder / INDEX
    files = json.loads(index.read_text())["weight_map"] if index.is_file() else dict.fromkeys(values, SINGLE)
    assert files.keys() == values.keys() and {*files.values(), INDEX} >= {path.name for path in folder.iterdir()}
    for name, value in values.items():
        with safe_open(folder / files[name], framework="pt") as file:
            found = file.get_tensor(name)
            assert file.get_slice(name).get_dtype() == tensors[name][0]
        assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value)
        assert value.element_size() == ELEMENT_BYTES[tensors[name][0]]
    if shard_bytes == ONE_FILE:
        assert [path.name for path in folder.iterdir()] == [SINGLE]


def test_every_tensor_lies_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=ONE_FILE)
    for number in range(1, 9):
        writer.add(f"bytes.{number}", torch.zeros(number, dtype=torch.int8).numpy())
        writer.add(f"floats.{number}", torch.zeros(number).numpy())
    writer.finish()
    content = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name.startswith("floats"):
            assert (8 + length + entry["data_offsets"][0]) % 4 == 0


def test_an_array_with_other_strides_is_written_as_it_reads(tmp_path: Path) -> None:
    """safetensors alone writes the memory as it lies there."""
    array = np.arange(6).reshape(2, 3)
    write_tensors(tmp_path / "a.safetensors", {"transposed": array.T, "one": np.float32(3)})
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        assert file.get_tensor("transposed").tolist() == array.T.tolist()
        assert file.get_tensor("one").shape == ()
