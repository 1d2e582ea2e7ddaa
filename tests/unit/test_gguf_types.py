"""GGUF files of quantized types: what is sound is read exactly; any one defect is refused, or the weights are exact."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.export.checkpoint import load_checkpoint
from quantization.stored import GGUF_TYPES
from tapeout.errors import TapeoutError
from tests.checkpoints import gguf_file
from tests.gguf_mixtures import checkpoint, values, write_mixture

TYPES = {
    "blk.0.attn_k.weight": "Q4_0",
    "blk.0.ffn_down.weight": "Q5_1",
    "blk.1.ffn_up.weight": "Q8_0",
    "blk.1.attn_v.weight": "BF16",
    "token_embd.weight": "Q5_0",
}
EXPERT_TYPES = {
    "blk.0.attn_k.weight": "Q4_0",
    "blk.0.ffn_gate_exps.weight": "Q5_1",
    "blk.0.ffn_up_exps.weight": "BF16",
    "blk.1.ffn_down_exps.weight": "Q8_0",
}
# Tensors that a defect is put in. No weight here is square: a square one that is transposed is another model, in no way
# a damaged file.
CHANGED = {
    "dense": [*sorted(set(TYPES) - {"token_embd.weight"}), "blk.1.ffn_norm.weight"],
    "qwen3_moe": [*sorted(EXPERT_TYPES), "blk.1.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight"],
    "gpt_oss": [
        *(f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")),
        *("blk.1.ffn_up_exps.bias", "blk.1.attn_sinks.weight", "blk.0.ffn_gate_inp.bias", "blk.1.attn_k.weight"),
    ],
}


class Entry(NamedTuple):
    """Where a file says what a tensor is: its name, dimensions, type and offset."""

    name: int
    dims: int
    count: int
    kind: int
    offset: int


def entry(data: bytes, name: str) -> Entry:
    written = struct.pack("<Q", len(name)) + name.encode()
    start = data.index(written)
    assert data.find(written, start + 1) < 0
    dims = start + len(written) + 4
    (count,) = struct.unpack_from("<I", data, dims - 4)
    return Entry(start + 8, dims, count, dims + 8 * count, dims + 8 * count + 4)


@cache
def sound(kind: str) -> tuple[bytes, dict[str, torch.Tensor]]:
    """A file, and the weights by name of the parameter. Experts of gpt-oss are in MXFP4."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        if kind == "dense":
            gguf_file(path, types=TYPES)
        else:
            source = checkpoint(path.parent / "source", kind, coded=kind == "gpt_oss")
            write_mixture(path, source, types=EXPERT_TYPES if kind == "qwen3_moe" else {})
        return path.read_bytes(), weights(path)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values(load_checkpoint(path.parent, path.name).model).items()}


def test_the_table_of_types_is_that_of_the_library() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import _type_traits

    known = {kind.name: GGML_QUANT_SIZES[kind] for kind in _type_traits}
    floats = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in ("F32", "F16")}
    assert dict(GGUF_TYPES) == known | floats


def another_type(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    """Of a type with as many bytes for as many values nothing but the file says which it is."""
    from gguf import GGMLQuantizationType

    def ratio(kind: int) -> float | None:
        found = GGUF_TYPES.get(GGMLQuantizationType(kind).name) if kind in list(GGMLQuantizationType) else None
        return found and found[1] / found[0]

    (old,) = struct.unpack_from("<I", data, at.kind)
    kinds = [kind for kind in range(48) if ratio(kind) is None or ratio(kind) != ratio(old)]
    struct.pack_into("<I", data, at.kind, draw(st.sampled_from(kinds)))


def another_dimension(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    place = at.dims + 8 * draw(st.integers(0, at.count - 1))
    (old,) = struct.unpack_from("<Q", data, place)
    new = draw(st.sampled_from([0, 1, old - 1, old + 1, old // 2, 2 * old, 2**40, 2**63]))
    struct.pack_into("<Q", data, place, new)


def transposed(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    dims = struct.unpack_from(f"<{at.count}Q", data, at.dims)
    struct.pack_into(f"<{at.count}Q", data, at.dims, *reversed(dims))


def another_name(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    (length,) = struct.unpack_from("<Q", data, at.name - 8)
    place = at.name + draw(st.integers(0, length - 1))
    data[place : place + 1] = draw(st.sampled_from([b"0", b"1", b"2", b".", b"_", b"q", b"x"]))


def another_offset(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    (old,) = struct.unpack_from("<Q", data, at.offset)
    struct.pack_into("<Q", data, at.offset, max(0, old + draw(st.sampled_from([-4096, -32, -1, 1, 32, 4096, 1 << 40]))))


def cropped(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    del data[len(data) - draw(st.sampled_from([1, 32, 33, 5000])) :]


def longer(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    data += bytes(draw(st.sampled_from([1, 32, 5000])))


def fewer_tensors(draw: st.DrawFn, data: bytearray, at: Entry) -> None:
    (count,) = struct.unpack_from("<Q", data, 8)
    struct.pack_into("<Q", data, 8, draw(st.sampled_from([0, 1, count - 1, count + 1])))


DEFECTS: list[Callable[[st.DrawFn, bytearray, Entry], None]] = [
    another_type,
    another_dimension,
    transposed,
    another_name,
    another_offset,
    cropped,
    longer,
    fewer_tensors,
]


@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_defect_is_refused_or_the_weights_are_exact(defect: Any, kind: str, data: st.DataObject) -> None:
    written, expected = sound(kind)
    changed = bytearray(written)
    defect(data.draw, changed, entry(written, data.draw(st.sampled_from(CHANGED[kind]))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(changed)
        try:
            found = weights(path)
        except TapeoutError as error:
            assert error.expected or error.remedy
            return
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "F64"])
def test_a_vector_of_another_type_is_refused(tmp_path: Path, kind: str) -> None:
    """Four sinks of float32 take 16 bytes of the 32 that every tensor begins on, so that no gap shows their type."""
    from gguf import GGMLQuantizationType

    data = bytearray(sound("gpt_oss")[0])
    struct.pack_into("<I", data, entry(bytes(data), "blk.1.attn_sinks.weight").kind, GGMLQuantizationType[kind])
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(TapeoutError, match=r"attn_sinks\.weight .* cannot be read"):
        weights(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Q4_1", "begins at byte"),
        ("Q4_K", "block size"),
        ("I32", "I32.* cannot be read"),
        ("F64", "F64.* cannot be read"),
    ],
)
def test_a_type_that_is_not_the_one_that_was_written_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    from gguf import GGMLQuantizationType

    data = bytearray(sound("dense")[0])
    struct.pack_into("<I", data, entry(bytes(data), "blk.0.attn_k.weight").kind, GGMLQuantizationType[kind])
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(TapeoutError, match=reason):
        weights(tmp_path / "m.gguf")
