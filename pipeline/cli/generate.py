"""``tapeout generate``: a prompt through a built engine, printed as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

from engines.bundle import EngineBundle
from engines.load import load
from engines.protocol import Engine
from runtime.chat import ChatTemplate
from runtime.generate import GenerationSettings, Piece, generate
from runtime.sampling import SamplingSettings
from tapeout import artifact


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
    record = artifact.load(bundle, EngineBundle).record
    settings = GenerationSettings(max_new_tokens, frozenset(record.stop_tokens), stop, sampling)
    tokenizer: Tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokens = prompt_tokens(bundle, tokenizer, prompt, system=system, raw=raw)
    engine = load(bundle, slots=1)
    try:
        _print(engine, tokenizer, tokens, settings, time.perf_counter() - started)
    finally:
        engine.close()


def _print(
    engine: Engine, tokenizer: Tokenizer, tokens: list[int], settings: GenerationSettings, load_s: float
) -> None:
    started = time.perf_counter()
    first_s, last = 0.0, Piece("", 0)
    for last in generate(engine, tokenizer, tokens, settings):
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


def prompt_tokens(bundle: Path, tokenizer: Tokenizer, prompt: str, *, system: str | None, raw: bool) -> list[int]:
    """Token ids of one user turn in the model's chat format, or of the plain text if ``raw``."""
    if raw:
        return tokenizer.encode(prompt).ids
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode(ChatTemplate.load(bundle).render(messages), add_special_tokens=False).ids
