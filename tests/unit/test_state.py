"""Kinds of state of a layer: their sizes and buffers, and the record that names them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from engines.bundle import EngineBundle, IOContract
from tapeout import artifact
from tapeout.artifact import RECORD
from tapeout.errors import ArtifactError
from tapeout.state import Paged, Recurrent, StateBuffer, StateTensor, paged_buffers, recurrent_buffers
from tests.judged import write_bundle
from tests.states import attention

CONV = StateTensor(name="conv", shape=(8, 3), dtype="float32")
DELTA = StateTensor(name="state", shape=(2, 4, 4), dtype="float32")
LATENT = StateTensor(name="latent", shape=(576,), dtype="int8")


def nbytes(buffers: list[StateBuffer]) -> int:
    return sum(np.zeros(buffer.shape, buffer.element).nbytes for buffer in buffers)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_bytes_are_those_of_the_buffers_of_layers_with_several_kinds_one_and_none(dtype: str) -> None:
    state = (
        Recurrent(layer=0, tensors=(CONV,)),
        attention(0, 2, 16, dtype),
        Recurrent(layer=2, tensors=(CONV, DELTA), snapshot_tokens=512),
        Paged(layer=3, tensors=(LATENT,), window=4096),
    )
    io = IOContract(inputs=(), state=state, max_tokens=64, slots=2, vocab_size=10)
    assert 7 * 16 * io.token_bytes == nbytes(list(paged_buffers(state, 7, 16)))
    assert 5 * io.slot_bytes == nbytes(list(recurrent_buffers(state, 5)))
    names = [buffer.name for buffer in (*paged_buffers(state, 7, 16), *recurrent_buffers(state, 5))]
    assert names == ["0.key", "0.value", "3.latent", "0.conv", "2.conv", "2.state"]
    assert IOContract.model_validate_json(io.model_dump_json()) == io, "a record keeps the kinds apart"


def test_a_kind_of_state_that_is_not_known_is_refused() -> None:
    written = json.loads(IOContract(inputs=(), state=(), max_tokens=1, slots=1, vocab_size=1).model_dump_json())
    written["state"] = [{"kind": "holographic", "layer": 0, "tensors": []}]
    with pytest.raises(ValidationError, match="paged"):
        IOContract.model_validate(written)


def test_a_bundle_of_before_is_refused_with_the_command_that_rebuilds_it(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", "weights")
    record = tmp_path / "bundle" / RECORD
    body = json.loads(record.read_text())
    assert body["schema_version"] == 5
    body |= {"schema_version": 4}
    body["record"]["io"] |= {"kv_dtype": "int8", "kv_layers": [{"heads": 3, "head_size": 64}]}
    record.write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match="written as EngineBundle schema 4, by an older version") as caught:
        artifact.load_record(tmp_path / "bundle", EngineBundle)
    assert caught.value.remedy == "run `dvc repro build-baseline build-candidate`"
