"""What is reported of a stage is what its process took."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.scale import Measured, count_parameters, measure
from benchmarks.scale_table import plot, read, table

HELD = 200 << 20


def test_allocated_and_mapped_memory_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * HELD)
    allocate = f"import time; held = b'x' * {HELD}; time.sleep(0.5)"
    read_mapped = (
        "import mmap, time; file = open('file', 'rb'); mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); "
        "total = sum(mapped[i] for i in range(0, len(mapped), 4096)); time.sleep(0.5); raise SystemExit(3)"
    )
    run = measure([sys.executable, "-c", allocate], tmp_path)
    # One thread that sleeps for 0.5 s, however slow the machine is.
    assert run.exit_code == 0 and 0 < run.processor_seconds < run.seconds - 0.4
    assert HELD < run.anonymous_bytes < 1.5 * HELD and run.resident_bytes > run.anonymous_bytes
    run = measure([sys.executable, "-c", read_mapped], tmp_path)
    assert run.exit_code == 3 and run.anonymous_bytes < 0.5 * HELD and run.resident_bytes > HELD


def test_the_table_holds_the_last_result_of_each_size_and_the_exponents(tmp_path: Path) -> None:
    def result(parameters: int, code: int, seconds: float, memory: int) -> str:
        return json.dumps(asdict(Measured("export", parameters, code, seconds, seconds, memory, memory, 10**9, 1.0)))

    lines = [result(10**9, 0, 99.0, 10**9), result(10**9, 0, 10.0, 10**9), result(4 * 10**9, 0, 40.0, 2 * 10**9)]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, result(8 * 10**9, 2, 1.0, 1)]))
    results = read([tmp_path / "results.jsonl"])
    text = table(results)
    assert "| export | 1.00 B | 10 | 10 | 1.00 GB |" in text and "99" not in text and "8.00 B" not in text
    assert "| export | 1.0 | 0.5 |" in text
    drawn = plot(results)
    assert drawn.startswith("<svg") and "export 1.0 and 0.5" in drawn and "peak anonymous memory, GB" in drawn


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 4), np.float16), "b": np.zeros(5, np.float32)}, tmp_path / "model.safetensors")
    assert count_parameters(tmp_path) == 17


def test_codes_count_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    """Planted: bytes are counted, of which one holds two weights."""
    codes, scales = np.zeros((2, 5, 3, 16), np.uint8), np.zeros((2, 5, 3), np.uint8)
    save_file({"experts_blocks": codes, "experts_scales": scales}, tmp_path / "model.safetensors")
    assert count_parameters(tmp_path) == 2 * 5 * 96
