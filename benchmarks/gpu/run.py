"""Compiled bundles on their own GPU: do they answer as their lowered graph does, and how fast are they?

python -m benchmarks.gpu.run artifacts/targets/*/tensorrt-rtx-sm89
python -m benchmarks.gpu.run artifacts/targets/fp8/tensorrt-rtx-sm89 --rounds 1 --out /tmp/gpu

Every bundle opens through the loader, which refuses any other GPU. Writes gpu-CAPABILITY.md and .json. Ends with 1 if
an engine's KL against the float engine is not what the lowered graph had on the CPU, with 2 if something broke.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.peers.corpus import Corpus, read_corpus
from engines.bundle import EngineBundle
from engines.load import load
from engines.protocol import Engine
from evals.kinds.text import TextSettings, text_items
from pipeline.recipe import load_recipe
from tapeout import artifact
from tapeout.artifact import Artifact, Frozen
from tapeout.errors import EvidenceError, ExitCode, TapeoutError

# How far an engine's KL may be from its lowered graph's: kernels add in another order and keep 16-bit sums.
KL_SHARE, KL_FLOOR = 0.2, 2e-3
WARMUP_STEPS = 3  # the first runs as it is, the second is the first replay of its graph


class GpuNumbers(Frozen):
    """Of one bundle. Seconds are medians over rounds; ``decode_ms`` is of one step, by batch."""

    folder: str
    digest: str
    precision: str
    capability: str
    engine_mb: float
    open_s: tuple[float, float]  # first, with kernels to be made; again, from the runtime cache
    kl: float  # nats, against the float engine on the CPU
    top_token: float
    perplexity_ratio: float
    portable_kl: float | None  # of the lowered graph, as the bundle says
    alone_and_together: float  # largest difference of a row's logits, relative to the largest logit
    prefill_ms: dict[int, float]  # by prompt tokens
    decode_ms: dict[int, float]

    @property
    def as_predicted(self) -> bool | None:
        """Whether the compiled engine answers as its lowered graph did; None where that was not recorded."""
        if self.portable_kl is None:
            return None
        return abs(self.kl - self.portable_kl) <= max(KL_SHARE * self.portable_kl, KL_FLOOR)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--reference", type=Path, default=Path("artifacts/baseline"), help="float bundle")
    parser.add_argument("--graph", type=Path, default=Path("artifacts/graph"))
    parser.add_argument("--source", type=Path, default=Path("artifacts/source"))
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--documents", type=int, default=8, help="as many as `tapeout build` takes by default")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    return parser.parse_args(words)


def prefill_seconds(engine: Engine, tokens: Sequence[int]) -> float:
    start = time.perf_counter()
    engine.prefill(0, tokens)
    return time.perf_counter() - start


def step_seconds(engine: Engine, prompt: Sequence[int], batch: int, steps: int) -> float:
    """Median of greedy decode steps of ``batch`` rows that all hold the prompt and grow by a token a step."""
    engine.prefill(0, prompt)
    for slot in range(1, batch):
        engine.copy_slot(0, slot, len(prompt))
    tokens, seconds = [prompt[-1]] * batch, list[float]()
    for step in range(WARMUP_STEPS + steps):
        start = time.perf_counter()
        tokens = engine.decode(tokens, [len(prompt) + step] * batch).argmax(axis=1).tolist()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARMUP_STEPS:])


def alone_and_together(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Largest difference of any row's logits decoded alone and beside the others, relative to the largest logit."""
    for slot, prompt in enumerate(prompts):
        engine.prefill(slot, prompt[:-1])
    last, lengths = [prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    together = engine.decode(last, lengths)
    alone = np.concatenate(
        [engine.decode(last[i : i + 1], lengths[i : i + 1], first_slot=i) for i in range(len(prompts))]
    )
    return float(np.abs(together - alone).max() / np.abs(together).max())


def timings(
    engines: Sequence[Engine],
    batches: Sequence[Sequence[int]],
    corpus: Corpus,
    *,
    rounds: int,
    new_tokens: int,
    say: Callable[[str], None],
) -> list[tuple[dict[int, float], dict[int, float]]]:
    """Of each engine, milliseconds of prefill by tokens and of a decode step by batch; engines take turns."""
    prefill: list[dict[int, list[float]]] = [{} for _ in engines]
    decode: list[dict[int, list[float]]] = [{} for _ in engines]
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for tokens in corpus.long_prompts.values():
            for engine, kept in zip(engines, prefill, strict=True):
                prefill_seconds(engine, tokens)  # the shape's kernels
                kept.setdefault(len(tokens), []).append(prefill_seconds(engine, tokens))
        for batch in sorted({batch for known in batches for batch in known}):
            for engine, known, kept in zip(engines, batches, decode, strict=True):
                if batch in known:
                    kept.setdefault(batch, []).append(step_seconds(engine, corpus.prompts[0], batch, new_tokens))
    return [(_milliseconds(p), _milliseconds(d)) for p, d in zip(prefill, decode, strict=True)]


def _milliseconds(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {key: 1e3 * median(values) for key, values in samples.items()}


def page(numbers: Sequence[GpuNumbers], *, rounds: int, documents: int) -> str:
    lines = [
        f"# Engines on {numbers[0].capability}",
        "",
        f"Medians of {rounds} rounds in which the engines took turns; KL and top token against the float engine on "
        f"{documents} held-out documents. *Predicted* is the KL that the lowered graph had on the CPU.",
        "",
        "| precision | engine MB | opens in s, again | KL | predicted | top token | row alone or in a batch |"
        " prefill tokens/s | decode tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in numbers:
        predicted = "-" if found.portable_kl is None else f"{found.portable_kl:.2g}"
        verdict = {True: "", False: " **differs**", None: ""}[found.as_predicted]
        prefill = ", ".join(f"{1e3 * tokens / ms:,.0f} of {tokens}" for tokens, ms in found.prefill_ms.items())
        decode = ", ".join(f"{1e3 * batch / ms:,.0f} at {batch}" for batch, ms in found.decode_ms.items())
        lines.append(
            f"| {found.precision} | {found.engine_mb:.0f} | {found.open_s[0]:.1f}, {found.open_s[1]:.1f} "
            f"| {found.kl:.2g} | {predicted}{verdict} | {found.top_token:.1%} | {found.alone_and_together:.1e} "
            f"| {prefill} | {decode} |"
        )
    return "\n".join([*lines, ""])


def run(options: argparse.Namespace, say: Callable[[str], None]) -> list[GpuNumbers]:
    bundles: list[Artifact[EngineBundle]] = [artifact.load(folder, EngineBundle) for folder in options.bundles]
    capabilities = {b.record.compiled.capability for b in bundles if b.record.compiled is not None}
    if len(capabilities) != 1 or any(b.record.compiled is None for b in bundles):
        raise EvidenceError(
            f"bundles for {', '.join(sorted(capabilities)) or 'no GPU'}", expected="bundles compiled for one GPU"
        )
    opened = [(_open_seconds(b.folder), _open_seconds(b.folder)) for b in bundles]
    engines = [load(b.folder) for b in bundles]
    buckets = [_buckets(b) for b in bundles]
    corpus = read_corpus(
        load_recipe(options.params),
        options.source,
        options.graph / "tokenizer.json",
        prompts=max(max(known) for known in buckets),
        prompt_tokens=options.prompt_tokens,
        prefill_tokens=tuple(options.prefill_tokens),
        documents=options.documents,
        document_tokens=load_recipe(options.params).section(TextSettings).document_tokens,
    )
    reference = load(options.reference, slots=1)
    times = timings(engines, buckets, corpus, rounds=options.rounds, new_tokens=options.new_tokens, say=say)
    numbers: list[GpuNumbers] = []
    for bundle, engine, seconds, known, (prefill_ms, decode_ms) in zip(
        bundles, engines, opened, buckets, times, strict=True
    ):
        say(f"{bundle.record.precision} against the float engine")
        items = text_items(reference, engine, corpus.documents)
        tokens = sum(item.tokens for item in items)
        compiled = bundle.record.compiled
        assert compiled is not None
        numbers.append(
            GpuNumbers(
                folder=str(bundle.folder),
                digest=bundle.digest,
                precision=bundle.record.precision,
                capability=compiled.capability,
                engine_mb=compiled.engine_bytes / 1e6,
                open_s=seconds,
                kl=sum(item.kl_sum for item in items) / tokens,
                top_token=sum(item.agree for item in items) / tokens,
                perplexity_ratio=float(np.exp(sum(item.candidate_nll - item.baseline_nll for item in items) / tokens)),
                portable_kl=None if compiled.portable is None else compiled.portable.kl,
                alone_and_together=alone_and_together(engine, corpus.prompts[: max(known)]),
                prefill_ms=prefill_ms,
                decode_ms=decode_ms,
            )
        )
        engine.close()
    return numbers


def _open_seconds(folder: Path) -> float:
    """To open an engine, prefill and decode once, and close it, which keeps its just-in-time kernels."""
    start = time.perf_counter()
    engine = load(folder)
    engine.prefill(0, [1])
    engine.decode([1], [1])
    seconds = time.perf_counter() - start
    engine.close()
    return seconds


def _buckets(bundle: Artifact[EngineBundle]) -> list[int]:
    compiled = bundle.record.compiled
    assert compiled is not None
    return [profile.batch for profile in compiled.profiles[1:] if profile.batch <= bundle.record.io.slots]


def main() -> int:
    options = arguments()
    try:
        numbers = run(options, lambda text: print(text, file=sys.stderr))
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"gpu-{numbers[0].capability}"
    body = [found.model_dump_json() for found in numbers]
    (options.out / f"{name}.json").write_text(f"[{','.join(body)}]\n")
    text = page(numbers, rounds=options.rounds, documents=options.documents)
    (options.out / f"{name}.md").write_text(text)
    print(text)
    return ExitCode.GATE_FAILED if any(found.as_predicted is False for found in numbers) else ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main())
