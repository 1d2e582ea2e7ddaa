"""Measure our bundles and all peers in one alternating run. Write docs/benchmarks/cpu.md, .svg and .json.

python -m benchmarks.peers.run --ours near-lossless=artifacts/candidate --ours 4-bit=artifacts/four
python -m benchmarks.peers.run --shape llama-3.2-1b --peers llama.cpp
python -m benchmarks.peers.run --ours near-lossless=artifacts/candidate --quick --out /tmp/peers
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.peers import environments, report, roofline, shapes
from benchmarks.peers.chosen_experts import chosen_experts, distinct
from benchmarks.peers.corpus import Corpus, read_corpus
from benchmarks.peers.judge import BARS_BY_KIND, Measured, Sample, Workload, schedule
from benchmarks.peers.process import PeerFailedError, PeerProcess
from benchmarks.peers.report import Run
from benchmarks.peers.systems import OURS, PEERS, READERS_OF_GGUF, System
from benchmarks.scale import count_parameters
from benchmarks.shapes import SHAPES, Shape
from engines.bundle import EngineBundle
from evals.text import kl_divergences
from pipeline.recipe import load_recipe
from pipeline.sources.source import Source
from tapeout import artifact
from tapeout.errors import EvidenceError, ExitCode, TapeoutError
from tapeout.portable_graph import PortableGraph

OUR_LEVELS = {"avx2": "x86-64-avx2"}  # of native kernels, by the instructions that all engines are held to


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=FOLDER", help="a bundle; may be repeated")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape; without KL")
    parser.add_argument("--layers", type=int, help="with --shape, only its first layers")
    parser.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="with --shape, one more bundle, with the schemes of this plan for another model; may be repeated",
    )
    parser.add_argument("--isa", choices=sorted(OUR_LEVELS), default="", help="hold all engines to these instructions")
    parser.add_argument("--peers", default="", help="only peers whose name contains one of these comma-separated words")
    parser.add_argument("--reference", type=Path, default=Path("artifacts/baseline"), help="float bundle")
    parser.add_argument("--checkpoint", type=Path, default=Path("artifacts/graph"))
    parser.add_argument("--source", type=Path, default=Path("artifacts/source"))
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, nargs="+", help="default: those that the bars name")
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--document-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="few tokens, one round: check that every peer works")
    parser.add_argument("--install-only", action="store_true", help="install and convert, measure nothing")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.new_tokens, options.documents = 1, 16, 2
    if not options.ours and not options.shape:
        parser.error("--ours or --shape is required")
    for option in ("plan", "layers"):
        if getattr(options, option) and not options.shape:
            parser.error(f"--{option} needs --shape")
    if options.prefill_tokens is None:
        known = BARS_BY_KIND[SHAPES[options.shape].kind if options.shape else "dense"]["near-lossless"]
        options.prefill_tokens = [workload.size for workload in known if workload.phase == "prefill"]
    return options


def our_systems(words: Sequence[str], isa: str = "") -> dict[System, Path]:
    """Bundles from ``NAME=FOLDER``; their bits per weight are added later. :class:`EvidenceError` for other words."""
    return {
        System(f"tapeout {name}", "ours", OURS, OUR_LEVELS.get(isa, ""), weight_bits=0, ours=True): folder
        for name, folder in named_folders("--ours", words, "near-lossless=artifacts/candidate").items()
    }


def named_folders(option: str, words: Sequence[str], example: str) -> dict[str, Path]:
    """Folders by name, from ``NAME=FOLDER``. :class:`EvidenceError` for other words."""
    found: dict[str, Path] = {}
    for word in words:
        name, _, folder = word.partition("=")
        if not name or not folder or "/" in name:
            raise EvidenceError(f"{option} {word}", expected="NAME=FOLDER", remedy=f"{option} {example}")
        if name in found:
            raise EvidenceError(f"{option} {name} twice", expected="a name of its own for each", remedy="rename one")
        found[name] = Path(folder)
    return found


def peers_for(shape: Shape | None, asked: str) -> list[System]:
    """Those that fit the model, with one of the comma-separated words ``asked`` in their names if it has any."""
    words = [word.strip() for word in asked.split(",") if word.strip()]
    fitting = [peer for peer in PEERS if peer.mxfp4 == (shape is not None and shape.is_mxfp4)]
    return [peer for peer in fitting if not words or any(word in peer.name for word in words)]


class Harness:
    """The running systems and their figures. If a system fails, the reason is recorded."""

    def __init__(self, options: argparse.Namespace, progress: Callable[[str], None]) -> None:
        self.options, self.progress = options, progress
        self.processes: dict[str, PeerProcess] = {}
        self.systems: dict[str, System] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.speeds: dict[tuple[str, Workload], list[float]] = {}
        self.peaks: dict[str, int] = {}
        self.turns: dict[str, roofline.Turns] = {}
        self.decoded: dict[str, tuple[tuple[int, ...], ...]] = {}  # streams of the largest batch
        self.experts: dict[str, dict[int, float]] = {}
        self.divergences: dict[str, list[np.ndarray]] = {}
        self.agreements: dict[str, list[np.ndarray]] = {}

    def prepare(self, systems: dict[System, Path], source_file: Path, checkpoint_digest: str) -> dict[System, Path]:
        """Install and convert the peers, one at a time."""
        ready: dict[System, Path] = {}
        for system, folder in systems.items():
            try:
                if not system.ours:
                    environments.install(system.environment, self.progress)
                    folder = environments.converted(
                        system, self.options.checkpoint, checkpoint_digest, source_file, self.progress
                    )
                ready[system] = folder
            except TapeoutError as error:
                self._fail(system.name, error)
        return ready

    def open(self, systems: dict[System, Path]) -> None:
        max_batch = max(self.options.batches)
        hiding = environments.hiding_library() if self.options.isa else None
        longest = max(self.options.prompt_tokens + self.options.new_tokens + 2, *self.options.prefill_tokens) + 2
        for system, folder in systems.items():
            self.progress(f"loading {system.name}")
            python = environments.python_of(system.environment)
            process = PeerProcess(
                system.adapter,
                python,
                environments.log_of(system),
                self.options.threads,
                preload=None if system.ours else hiding,
            )
            try:
                loaded = process.ask(
                    "load",
                    folder=str(folder.resolve()),
                    variant=system.variant,
                    threads=self.options.threads,
                    max_batch=max_batch,
                    max_tokens=longest,
                )
                if hiding and loaded["avx512"] and not system.ours:
                    raise environments.PeerError(
                        f"skipped: {system.name} has AVX-512", expected="a build for AVX2", remedy=environments.LIMITS
                    )
            except (PeerFailedError, environments.PeerError) as error:
                process.close()
                self._fail(system.name, error)
                continue
            process.pause()
            self.processes[system.name], self.systems[system.name] = process, system
            self.loaded[system.name] = loaded

    def warm_up(self, corpus: Corpus) -> None:
        for name in list(self.processes):
            self.progress(f"warming up {name}")
            self._ask(name, "prefill", tokens=corpus.prompts[0])
            self._ask(name, "decode", prompts=corpus.prompts[:1], new_tokens=8)

    def measure(self, corpus: Corpus) -> None:
        """All speeds, in alternation. Then peak memory, before the logits of whole texts increase it."""
        workloads = [Workload("decode", batch) for batch in self.options.batches]
        workloads += [Workload("prefill", count) for count in self.options.prefill_tokens]
        for number, workload, name in schedule(list(self.processes), workloads, self.options.rounds):
            if workload.phase == "prefill":
                asked = [self._ask(name, "prefill", tokens=prompt) for prompt in corpus.long_prompts[workload.size]]
                rates = [workload.size / answer["seconds"] for answer in asked if answer]
            else:
                prompts = corpus.prompts[: workload.size]
                answer = self._ask(name, "decode", prompts=prompts, new_tokens=self.options.new_tokens)
                rates = [workload.size * answer["steps"] / answer["seconds"]] if answer else []
                if answer and answer["tokens"] and workload.size == max(self.options.batches):
                    pairs = zip(prompts, answer["tokens"], strict=True)
                    self.decoded[name] = tuple((*prompt, *tokens) for prompt, tokens in pairs)
            if rates:
                rate = median(rates)
                self.speeds.setdefault((name, workload), []).append(rate)
                self.progress(f"round {number + 1} of {self.options.rounds}, {workload}: {name} {rate:,.0f} tokens/s")
        for name, process in self.processes.items():
            try:
                self.peaks[name] = process.peak_memory_bytes()
            except PeerFailedError as error:
                self._fail(name, error)

    def read_in_turns(self, corpus: Corpus, bundles: dict[System, Path]) -> None:
        """The share of the roofline of each of our bundles that was measured."""
        for system, folder in bundles.items():
            if (system.name, Workload("decode", 1)) not in self.speeds:
                continue
            self.progress(f"reading memory and decoding in turns: {system.name}")
            try:
                self.turns[system.name] = roofline.in_turns(
                    folder, self.options.threads, corpus.prompts[0], level=system.variant
                )
            except TapeoutError as error:
                self._fail(system.name, error)

    def count_experts(self, checkpoint: Path) -> None:
        """Of every system that told which tokens it decoded. Engines have ended: the float model is in memory."""
        for name, streams in self.decoded.items():
            self.progress(f"counting the experts that {name} needed")
            layers = chosen_experts(checkpoint, streams, self.options.prompt_tokens)
            self.experts[name] = {batch: distinct(layer[:batch] for layer in layers) for batch in self.options.batches}

    def compare(self, corpus: Corpus, reference: PeerProcess) -> None:
        """KL and top-token agreement of every system against the float reference, document by document.

        The engine gets ``document[:-1]``. The predictions of all following tokens are compared, as in ``evals.text``.
        """
        with tempfile.TemporaryDirectory(prefix="tapeout-logits-") as scratch:
            file = Path(scratch) / "logits.npy"
            for number, document in enumerate(corpus.documents):
                self.progress(f"comparing predictions on document {number + 1} of {len(corpus.documents)}")
                reference.resume()
                reference.ask("logits", tokens=document[:-1], file=str(file))
                reference.pause()
                expected = np.load(file)
                for name in list(self.processes):
                    if name in self.failures and "logits" in self.failures[name]:
                        continue
                    answer = self._ask(name, "logits", tokens=document[:-1], file=str(file))
                    if answer:
                        self._compare(name, expected, np.load(file))

    def _compare(self, name: str, expected: np.ndarray, got: np.ndarray) -> None:
        # A peer may pad its vocabulary. The padding is after the reference's tokens and is ignored.
        got = got[:, : expected.shape[1]]
        if got.shape != expected.shape or not np.isfinite(got).all():
            found = f"logits of shape {got.shape}, all finite: {np.isfinite(got).all()}"
            self._fail(name, EvidenceError(found, expected=f"finite logits of shape {expected.shape}"))
            return
        self.divergences.setdefault(name, []).append(kl_divergences(expected, got))
        self.agreements.setdefault(name, []).append(expected.argmax(1) == got.argmax(1))

    def results(self, bundles: dict[System, Path]) -> list[Measured]:
        folders = {system.name: folder for system, folder in bundles.items()}
        found: list[Measured] = []
        for name, system in self.systems.items():
            samples = [
                Sample(phase=workload.phase, size=workload.size, tokens_per_s=tuple(rounds))
                for (owner, workload), rounds in self.speeds.items()
                if owner == name and len(rounds) == self.options.rounds
            ]
            kl, agree = self.divergences.get(name), self.agreements.get(name)
            measured = Measured(
                name=name,
                ours=system.ours,
                unclassed=system.unclassed,
                by_format=system.by_format or bool(self.options.shape),
                weight_bits=system.weight_bits,
                file_bytes=self.loaded[name].get("file_bytes", 0),
                peak_bytes=self.peaks.get(name, 0),
                samples=tuple(samples),
                kl=float(np.concatenate(kl).mean()) if kl else None,
                top_token=float(np.concatenate(agree).mean()) if agree else None,
                predictions=sum(map(len, kl)) if kl else 0,
                turns=self.turns.get(name),
                experts=self.experts.get(name, {}),
                versions=environments.versions(system.environment),
            )
            found.append(self._with_bundle(measured, folders[name]) if system.ours else measured)
        return found

    def _with_bundle(self, measured: Measured, folder: Path) -> Measured:
        """Add what only our own record has: bytes of the weights, and of the largest workload's KV cache and state."""
        record = artifact.load(folder, EngineBundle).record
        positions = max(
            max(self.options.batches) * (self.options.prompt_tokens + self.options.new_tokens),
            *self.options.prefill_tokens,
        )
        state = positions * record.io.token_bytes + max(self.options.batches) * record.io.slot_bytes
        parameters = count_parameters(self.options.checkpoint)
        return measured.model_copy(
            update={
                "weight_bits": 8 * record.weight_bytes / parameters,
                "file_bytes": record.weight_bytes,
                "budget_bytes": record.weight_bytes + state,
            }
        )

    def _ask(self, name: str, command: str, **values: Any) -> Any:
        """Resume, ask, pause. A failure is recorded, and the answer is None."""
        process = self.processes[name]
        process.resume()
        try:
            return process.ask(command, **values)
        except PeerFailedError as error:
            self._fail(name, error)
            return None
        finally:
            process.pause()

    def _fail(self, name: str, error: TapeoutError) -> None:
        self.failures[name] = str(error).splitlines()[0]
        self.progress(f"{name} failed: {self.failures[name]}")

    def close(self) -> None:
        for process in self.processes.values():
            process.close()
        self.processes.clear()


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    try:
        return bench(options, lambda text: print(text, file=sys.stderr, flush=True))
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN


def bench(options: argparse.Namespace, progress: Callable[[str], None]) -> int:
    plans = named_folders("--plan", options.plan, "latency=artifacts/plan")
    if "default" in plans:
        raise EvidenceError("--plan default", expected="another name: default is the recipe's", remedy="rename it")
    prepared, shape, stem = None, None, "cpu"
    if options.shape:
        stem, shape = shapes.asked_shape(options.shape, options.layers)
    peers = peers_for(shape, options.peers)
    if shape:
        needs_gguf = any(peer.adapter in READERS_OF_GGUF for peer in peers)
        prepared = shapes.prepare(stem, shape, options.params, plans, options.checkpoint, progress, gguf=needs_gguf)
        options.checkpoint, options.source = prepared.checkpoint, prepared.source
        options.ours.extend(f"{name}={folder}" for name, folder in prepared.bundles.items())
    source = artifact.load(options.source, Source)
    graph = artifact.load(options.checkpoint, PortableGraph)
    bundles = our_systems(options.ours, options.isa)
    harness = Harness(options, progress)
    file = prepared.gguf if prepared else options.source / source.record.model_entry
    systems = map(environments.limited, peers) if options.isa else peers
    ready = harness.prepare({**bundles, **dict.fromkeys(systems, Path())}, file, graph.digest)
    if options.install_only:
        return ExitCode.BROKEN if harness.failures else ExitCode.PASS
    recipe = load_recipe(options.params)
    corpus = read_corpus(
        recipe,
        options.source,
        options.checkpoint / "tokenizer.json",
        prompts=max(options.batches),
        prompt_tokens=options.prompt_tokens,
        prefill_tokens=tuple(options.prefill_tokens),
        documents=options.documents,
        document_tokens=options.document_tokens,
    )
    # The reference is loaded first: if it is missing or stale, the run ends before anything is timed.
    reference = None if prepared else _reference(options)
    try:
        harness.open(ready)
        harness.warm_up(corpus)
        harness.measure(corpus)
        harness.read_in_turns(corpus, bundles)
        if reference:
            harness.compare(corpus, reference)
        harness.close()
        if shape and shape.has_experts:
            harness.count_experts(options.checkpoint)
        run = Run(
            systems=tuple(harness.results(bundles)),
            failures=harness.failures,
            threads=options.threads,
            rounds=options.rounds,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            documents=len(corpus.documents) if reference else 0,
            machine=report.machine() + (f", all engines held to {options.isa.upper()}" if options.isa else ""),
            model=f"{stem} (random weights)" if prepared else recipe.register_.model_name,
            kind=shape.kind if shape else "dense",
        )
    finally:
        if reference:
            reference.close()
        harness.close()
    page = "-".join(word for word in (stem, options.isa) if word)
    report.write(run, options.out, page)
    progress(f"wrote {options.out / page}.md")
    return ExitCode.PASS


def _reference(options: argparse.Namespace) -> PeerProcess:
    log = environments.log_of(System("float reference", "ours", OURS, "", weight_bits=32))
    process = PeerProcess("ours", environments.python_of(OURS), log, options.threads)
    try:
        process.ask(
            "load",
            folder=str(options.reference.resolve()),
            variant="",
            threads=options.threads,
            max_batch=1,
            max_tokens=options.document_tokens,
        )
    except PeerFailedError:
        process.close()
        raise
    process.pause()
    return process


if __name__ == "__main__":
    sys.exit(main())
