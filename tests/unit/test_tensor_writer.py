"""A safetensors file that is written tensor by tensor, against the safetensors package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tapeout.tensor_writer import TensorSpec, write_tensors

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I8": torch.int8}
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(tensors=st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6))
def test_bytes_are_those_of_the_safetensors_package(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    folder = tmp_path_factory.mktemp("written")
    values = {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(DTYPES[d])
        for name, (d, shape) in tensors.items()
    }
    save_file(values, folder / "expected", metadata={"format": "pt"})

    def pieces(name: str) -> list[bytes]:
        data = values[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [data[:3], data[3:]]

    write_tensors(folder / "written", {name: TensorSpec(d, shape) for name, (d, shape) in tensors.items()}, pieces)
    assert (folder / "written").read_bytes() == (folder / "expected").read_bytes()


def test_a_tensor_with_too_few_bytes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w has 4 bytes, and 8 by its type and shape"):
        write_tensors(tmp_path / "w", {"w": TensorSpec("F32", (2,))}, lambda _: [b"1234"])
