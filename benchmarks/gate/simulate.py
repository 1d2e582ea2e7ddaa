"""Simulate the gate: how often each check passes where the truth lies on its bound, and how often a good engine does.

``make simulate-gate`` writes docs/benchmarks/gate.md and gate.json. Every figure comes from the code that judges:
``EvidenceKind.judge`` of one kind, or ``evals.gate.judge`` of all. docs/statistics.md says what is promised and why.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.gate import evidence as made
from benchmarks.gate.documents import PARITY, SHADOW, TEXT, document_rows
from benchmarks.gate.evidence import Run
from benchmarks.gate.kinds import serving_rows, source_rows, speed_rows, task_rows
from benchmarks.gate.page import page, share_of_runs
from benchmarks.gate.rows import NONE, RARE, Result, Row, run_row
from benchmarks.gate.whole import gate_rows
from evals.kind import Bounds
from pipeline.recipe import load_recipe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "gate.md"
RUNS = 2000


def rows() -> list[Row]:
    run, bounds = Run.kept(), load_recipe(ROOT / "params.yaml").section(Bounds)
    few = list(document_rows(TEXT, run, bounds, count=30))
    return [
        *(row for of in (TEXT, SHADOW, PARITY) for row in document_rows(of, run, bounds, count=of.count)),
        *few[:4],
        *task_rows(run, bounds),
        *source_rows(run, bounds),
        *serving_rows(bounds),
        *speed_rows(bounds),
        *gate_rows(run, bounds),
        *(row for of in (TEXT, SHADOW) for row in document_rows(of, run, bounds, count=of.count, promise=RARE)),
        *document_rows(PARITY, run, bounds, count=PARITY.count, promise=NONE),
    ]


def run_number(number: int, runs: int) -> list[Result]:
    """For another process: a row itself cannot be sent there."""
    return run_row(rows()[number], runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--page", type=Path, default=PAGE, help="a .json file is written beside it")
    parser.add_argument("--keep", type=Path, metavar="ARTIFACTS", help="take the figures of this real run from now on")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.keep:
        made.keep(options.keep)
    confidence = load_recipe(ROOT / "params.yaml").section(Bounds).confidence
    results: list[Result] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for found in pool.map(partial(run_number, runs=options.runs), range(len(rows()))):
            for result in found:
                shares = (share_of_runs(count, result.runs) for count in (result.passed, result.failed))
                print(f"{result.check:20} {result.distribution:60} {result.units:18} {'   '.join(shares)}", flush=True)
            results += found
    options.page.write_text(page(results, options.runs, confidence))
    options.page.with_suffix(".json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    broken = [f"{result.check}: {result.distribution}" for result in results if not result.holds(confidence)]
    print("\n".join(f"does not keep its promise: {name}" for name in broken) or "every row keeps its promise")
    return bool(broken)


if __name__ == "__main__":
    raise SystemExit(main())
