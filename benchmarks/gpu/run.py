"""Measure compiled bundles on their own GPU: do they agree with their lowered graph, and how fast are they?

python -m benchmarks.gpu.run artifacts/targets/*/tensorrt-rtx-sm89
python -m benchmarks.gpu.run artifacts/targets/fp8/tensorrt-rtx-sm89 --rounds 1 --out /tmp/gpu

Every bundle opens through the loader, which refuses any other GPU. Writes gpu-CAPABILITY.md and .json. Ends with exit
code 1 if an engine's KL against the float engine differs from that of its lowered graph on the CPU, and with 2 if
something broke.
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
from engines.sequences import Sequences
from evals.kinds.text import HeldOutSettings, text_items
from pipeline.recipe import load_recipe
from tapeout import artifact
from tapeout.artifact import Artifact, Frozen
from tapeout.errors import EvidenceError, ExitCode, TapeoutError

# Largest difference of an engine's KL from its lowered graph's: GPU kernels sum in another order, in 16 bits.
KL_SHARE, KL_FLOOR = 0.2, 2e-3
WARMUP_STEPS = 3  # the first step runs without a CUDA graph, the second is the first replay of one


class GpuNumbers(Frozen):
    """The figures of one bundle. Times are medians over rounds; ``decode_ms`` is the time of one step."""

    folder: str
    digest: str
    precision: str
    capability: str
    engine_mb: float
    open_s: tuple[float, float]  # first open, which compiles kernels; second open, from the runtime cache
    kl: float  # nats, against the float engine on the CPU
    top_token: float
    perplexity_ratio: float
    portable_kl: float | None  # of the lowered graph on the CPU, from the bundle's record
    batch_difference: float  # of logits between batch 1 and a whole batch, relative to the largest logit
    prefill_ms: dict[int, float]  # by prompt tokens
    decode_ms: dict[int, float]  # by batch size

    @property
    def as_predicted(self) -> bool | None:
        """Whether the engine's KL is that of its lowered graph; None if the bundle does not record that KL."""
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
    parser.add_argument("--documents", type=int, default=8, help="default: as many as `tapeout build` uses")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    return parser.parse_args(words)


def prefill_seconds(engine: Sequences, tokens: Sequence[int]) -> float:
    start = time.perf_counter()
    engine.prefill(0, tokens)
    return time.perf_counter() - start


def step_seconds(engine: Sequences, prompt: Sequence[int], batch: int, steps: int) -> float:
    """Median time of a greedy decode step of ``batch`` sequences that all start with the prompt."""
    engine.prefill(0, prompt)
    for slot in range(1, batch):
        engine.copy_slot(0, slot, len(prompt))
    # Equal ones would all choose the same experts of a mixture.
    tokens, seconds = [prompt[-1 - slot % len(prompt)] for slot in range(batch)], list[float]()
    for step in range(WARMUP_STEPS + steps):
        start = time.perf_counter()
        tokens = engine.decode(tokens, [len(prompt) + step] * batch).argmax(axis=1).tolist()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARMUP_STEPS:])


def batch_difference(engine: Sequences, prompts: Sequence[Sequence[int]]) -> float:
    """Largest difference of a sequence's logits between batch 1 and the whole batch, relative to the largest logit."""
    for slot, prompt in enumerate(prompts):
        engine.prefill(slot, prompt[:-1])
    last, lengths = [prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    batched = engine.decode(last, lengths)
    single = np.concatenate(
        [engine.decode(last[i : i + 1], lengths[i : i + 1], first_slot=i) for i in range(len(prompts))]
    )
    return float(np.abs(batched - single).max() / np.abs(batched).max())


def timings(
    engines: Sequence[Sequences],
    batches: Sequence[Sequence[int]],
    corpus: Corpus,
    *,
    rounds: int,
    new_tokens: int,
    progress: Callable[[str], None],
) -> list[tuple[dict[int, float], dict[int, float]]]:
    """Milliseconds of prefill by prompt tokens and of a decode step by batch size, per engine; engines take turns.

    ``batches``: the batch sizes of each engine.
    """
    prefill: list[dict[int, list[float]]] = [{} for _ in engines]
    decode: list[dict[int, list[float]]] = [{} for _ in engines]
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for tokens, *_ in corpus.long_prompts.values():
            for engine, samples in zip(engines, prefill, strict=True):
                prefill_seconds(engine, tokens)  # compiles the kernels for this shape
                samples.setdefault(len(tokens), []).append(prefill_seconds(engine, tokens))
        for batch in sorted({batch for buckets in batches for batch in buckets}):
            for engine, buckets, samples in zip(engines, batches, decode, strict=True):
                if batch in buckets:
                    samples.setdefault(batch, []).append(step_seconds(engine, corpus.prompts[0], batch, new_tokens))
    return [(_milliseconds(p), _milliseconds(d)) for p, d in zip(prefill, decode, strict=True)]


def _milliseconds(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {key: 1e3 * median(values) for key, values in samples.items()}


def page(numbers: Sequence[GpuNumbers], *, rounds: int, documents: int) -> str:
    lines = [
        f"# Engines on {numbers[0].capability}",
        "",
        f"Medians of {rounds} rounds in which the engines took turns. KL and top token are against the float engine on "
        f"{documents} held-out documents. *Predicted* is the KL that the lowered graph had on the CPU. *Batch "
        "difference* is the largest difference of a sequence's logits between batch 1 and a whole batch, relative to "
        "the largest logit.",
        "",
        "| precision | engine MB | first open, second open (s) | KL | predicted | top token | batch difference |"
        " prefill tokens/s | decode tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in numbers:
        predicted = "-" if found.portable_kl is None else f"{found.portable_kl:.2g}"
        verdict = {True: "", False: " **differs**", None: ""}[found.as_predicted]
        prefill = ", ".join(f"{1e3 * tokens / ms:,.0f} at {tokens} tokens" for tokens, ms in found.prefill_ms.items())
        decode = ", ".join(f"{1e3 * batch / ms:,.0f} at batch {batch}" for batch, ms in found.decode_ms.items())
        lines.append(
            f"| {found.precision} | {found.engine_mb:.0f} | {found.open_s[0]:.1f}, {found.open_s[1]:.1f} "
            f"| {found.kl:.2g} | {predicted}{verdict} | {found.top_token:.1%} | {found.batch_difference:.1e} "
            f"| {prefill} | {decode} |"
        )
    return "\n".join([*lines, ""])


def run(options: argparse.Namespace, progress: Callable[[str], None]) -> list[GpuNumbers]:
    bundles: list[Artifact[EngineBundle]] = [artifact.load(folder, EngineBundle) for folder in options.bundles]
    capabilities = {b.record.compiled.capability for b in bundles if b.record.compiled is not None}
    if len(capabilities) != 1 or any(b.record.compiled is None for b in bundles):
        raise EvidenceError(
            f"bundles for {', '.join(sorted(capabilities)) or 'no GPU'}",
            expected="bundles that are all compiled for the same compute capability",
        )
    open_times = [(_open_seconds(b.folder), _open_seconds(b.folder)) for b in bundles]
    engines = [Sequences(load(b.folder)) for b in bundles]
    batches = [_buckets(b) for b in bundles]
    corpus = read_corpus(
        load_recipe(options.params),
        options.source,
        options.graph / "tokenizer.json",
        prompts=max(max(buckets) for buckets in batches),
        prompt_tokens=options.prompt_tokens,
        prefill_tokens=tuple(options.prefill_tokens),
        documents=options.documents,
        document_tokens=load_recipe(options.params).section(HeldOutSettings).document_tokens,
    )
    reference = Sequences(load(options.reference, slots=1))
    times = timings(engines, batches, corpus, rounds=options.rounds, new_tokens=options.new_tokens, progress=progress)
    numbers: list[GpuNumbers] = []
    for bundle, engine, open_s, buckets, (prefill_ms, decode_ms) in zip(
        bundles, engines, open_times, batches, times, strict=True
    ):
        progress(f"comparing {bundle.record.precision} with the float engine")
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
                open_s=open_s,
                kl=sum(item.kl_sum for item in items) / tokens,
                top_token=sum(item.agree for item in items) / tokens,
                perplexity_ratio=float(np.exp(sum(item.candidate_nll - item.baseline_nll for item in items) / tokens)),
                portable_kl=None if compiled.portable is None else compiled.portable.kl,
                batch_difference=batch_difference(engine, corpus.prompts[: max(buckets)]),
                prefill_ms=prefill_ms,
                decode_ms=decode_ms,
            )
        )
        engine.close()
    return numbers


def _open_seconds(folder: Path) -> float:
    """Time to open an engine, prefill and decode once. Closing the engine stores its compiled kernels in the cache."""
    start = time.perf_counter()
    engine = Sequences(load(folder))
    engine.prefill(0, [1])
    engine.decode([1], [1])
    seconds = time.perf_counter() - start
    engine.close()
    return seconds


def _buckets(bundle: Artifact[EngineBundle]) -> list[int]:
    """The decode batch sizes that the bundle has a profile for."""
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
