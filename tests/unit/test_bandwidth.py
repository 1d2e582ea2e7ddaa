"""The bandwidth probe reads all it says it reads, and a share of the roofline above one is refused."""

from __future__ import annotations

import ctypes

import pytest

from engines.costs import bandwidth
from engines.costs.timing import last_level_cache_bytes
from engines.kernels import cpu as native
from engines.kernels.cpu import compiler
from tapeout.errors import EvidenceError

LARGE = 10 * last_level_cache_bytes()


def test_a_share_is_what_a_step_reads_over_what_the_memory_gives() -> None:
    assert bandwidth.roofline_share(LARGE, LARGE / 25e9, 50e9) == pytest.approx(0.5)


def test_a_step_that_reads_faster_than_the_probe_is_refused() -> None:
    with pytest.raises(EvidenceError, match=r"60\.0 GB/s of weights, 120% of the bandwidth"):
        bandwidth.roofline_share(LARGE, LARGE / 60e9, 50e9)


def test_weights_in_the_cache_are_not_read_from_memory() -> None:
    assert bandwidth.roofline_share(1 << 16, (1 << 16) / 60e9, 50e9) == pytest.approx(1.2)


def test_the_probe_is_refused_where_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.level() is None:
        pytest.skip(native.unsupported())
    with pytest.raises(EvidenceError, match="cannot be measured"):
        bandwidth.read_bandwidth(0)
    monkeypatch.setattr(bandwidth, "BYTES", 1)
    with pytest.raises(EvidenceError, match="cannot be measured"):
        bandwidth.read_bandwidth(1)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_both_probes_measure_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(bandwidth, "BYTES", 8 << 20)
    monkeypatch.setattr(bandwidth, "TRIALS", 1)
    assert bandwidth.read_bandwidth(threads) > 0
    monkeypatch.setattr(bandwidth, "level", lambda: None)
    assert bandwidth.read_bandwidth(threads) > 0


@pytest.mark.parametrize("level", native.LEVELS, ids=lambda level: level.name)
def test_every_level_has_the_probe(level: native.Level) -> None:
    if refusal := level.refusal():
        pytest.skip(refusal)
    probe = ctypes.CDLL(str(compiler.library(level))).tapeout_read_bandwidth
    assert probe is not None
