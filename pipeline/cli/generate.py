"""``tapeout generate``: a prompt through a built engine, printed as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from engines.load import not_executable
from runtime.api import TextEngine, load
from runtime.generate import Piece
from runtime.wire.messages import SamplingSettings


def run(
    bundle: Path,
    prompt: str,
    *,
    system: str | None,
    raw: bool,
    max_new_tokens: int,
    stop: tuple[str, ...],
    sampling: SamplingSettings,
) -> None:
    """Text goes to standard output, the closing line of numbers to standard error."""
    started = time.perf_counter()
    with load(bundle) as engine:
        if reason := not_executable(engine.bundle):
            print(f"emulated on the processor, where a token takes seconds: {reason}", file=sys.stderr)
        tokens = engine.encode(prompt, system=system, raw=raw)
        _print(engine, tokens, max_new_tokens, stop, sampling, time.perf_counter() - started)


def _print(
    engine: TextEngine,
    tokens: list[int],
    max_new_tokens: int,
    stop: tuple[str, ...],
    sampling: SamplingSettings,
    load_s: float,
) -> None:
    started = time.perf_counter()
    first_s, last = 0.0, Piece("", 0)
    for last in engine.stream(tokens, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling):
        first_s = first_s or time.perf_counter() - started
        sys.stdout.write(last.text)
        sys.stdout.flush()
    seconds = time.perf_counter() - started
    sys.stdout.write("\n")
    sys.stdout.flush()
    rate = f", {(last.tokens - 1) / (seconds - first_s):.0f} tokens/s" if last.tokens > 1 and seconds > first_s else ""
    print(
        f"[{len(tokens)} prompt tokens; {last.tokens} new ({last.finish_reason}); "
        f"first text after {first_s * 1000:.0f} ms{rate}; loaded in {load_s:.1f} s]",
        file=sys.stderr,
    )
