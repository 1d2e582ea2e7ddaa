"""Gram matrices in a quarter of their bytes, and hidden states in files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantization import statistics
from quantization.hidden_states import HiddenStates
from quantization.output_error import diagonal
from quantization.statistics import pack_gram, unpack_gram
from tapeout.layer_stream import LayerState


@given(
    blocks=st.integers(1, 3),
    columns=st.integers(1, 40),
    tokens=st.integers(1, 60),
    rows=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_a_gram_matrix_comes_back_but_for_a_step_of_its_correlations(
    blocks: int, columns: int, tokens: int, rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((blocks, tokens, columns)) * 10.0 ** rng.integers(-3, 4, columns)
    x[:, :, rng.random(columns) < 0.1] = 0  # channels that nothing reaches
    gram = (x.transpose(0, 2, 1) @ x / tokens).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_ROWS_AT_ONCE", rows)
        found = unpack_gram(*pack_gram(np.triu(gram) + np.tril(np.full_like(gram, np.nan), -1)))
    size = np.sqrt(np.einsum("bkk->bk", gram).astype(np.float64))
    assert (found == found.transpose(0, 2, 1)).all() and (diagonal(found) == diagonal(gram)).all()
    assert (np.abs(found - gram) <= 1.7e-5 * size[:, :, None] * size[:, None]).all()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), layers=st.integers(0, 3), written=st.integers(0, 6))
def test_hidden_states_are_those_of_the_last_layer_that_was_finished(
    lengths: list[int], layers: int, written: int
) -> None:
    def state(layer: int, sample: int) -> LayerState:
        carried = {"shared": {"kind": torch.full((2,), layer)}} if sample == 0 and layer == 2 else {}
        return LayerState(torch.full((1, lengths[sample], 5), 10.0 * layer + sample), carried)

    with tempfile.TemporaryDirectory() as name:
        states = HiddenStates(Path(name), lengths)
        for layer in range(layers):
            for sample in range(len(lengths)):
                states.write(state(layer, sample))
            states.advance()
        for sample in range(min(written, len(lengths))):  # of a layer that is not finished
            states.write(state(layers, sample))
        again = HiddenStates(Path(name), lengths)
        assert again.layer == layers
        for sample in range(len(lengths)):
            found, expected = again.read(sample), state(layers - 1, sample) if layers else LayerState()
            assert (found.hidden is None) == (expected.hidden is None)
            if found.hidden is not None and expected.hidden is not None:
                assert torch.equal(found.hidden, expected.hidden)
            assert found.carried.keys() == expected.carried.keys()
        kept = {path.name for path in Path(name).iterdir() if not path.suffix}
        assert kept == ({f"hidden-{layers:03d}"} if layers else set())
