"""Engines that are held to older instructions than the processor has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import run
from benchmarks.peers.environments import hiding_library, limited, python_of, requirements
from benchmarks.peers.systems import PEERS, System
from engines.kernels.cpu import find_level

FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
FEATURES = "from numpy._core._multiarray_umath import __cpu_features__ as f; print(f['AVX2'], f['AVX512F'])"
hides = pytest.mark.skipif(
    not {"avx512f", "cpuid_fault"} <= {*FLAGS}, reason="needs a processor with AVX-512 and CPUID faulting"
)


def python(words: str, *, hidden: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"LD_PRELOAD": str(hiding_library())} if hidden else {})}
    return subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True)


@hides
def test_a_library_that_asks_the_processor_finds_avx2_and_nothing_newer() -> None:
    assert python(FEATURES, hidden=False).stdout.split() == ["True", "True"]
    assert python(FEATURES, hidden=True).stdout.split() == ["True", "False"]
    in_thread = f"import threading; t = threading.Thread(target=exec, args=({FEATURES!r},)); t.start(); t.join()"
    assert python(in_thread, hidden=True).stdout.split() == ["True", "False"]
    in_child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FEATURES!r}])"
    assert python(in_child, hidden=True).stdout.split() == ["True", "False"]


@hides
def test_a_real_fault_still_ends_the_process() -> None:
    assert python("import ctypes; ctypes.string_at(0)", hidden=True).returncode == -signal.SIGSEGV


def test_compiled_peers_have_an_environment_of_their_own_for_avx2() -> None:
    environments = {peer.environment: limited(peer).environment for peer in PEERS}
    assert {name for name, held in environments.items() if name != held} == {"llama-cpp"}
    held = environments["llama-cpp"]
    assert requirements(held) == requirements("llama-cpp") and python_of(held) != python_of("llama-cpp")


def test_our_bundles_run_at_the_level_of_the_instructions() -> None:
    words = ["--ours", "default=a/b"]
    assert [system.variant for system in run.our_systems(words[1:])] == [""]
    options = run.arguments([*words, "--isa", "avx2"])
    level = find_level(next(iter(run.our_systems(options.ours, options.isa))).variant)
    assert not any(feature.startswith("avx512") or feature == "avx_vnni" for feature in level.needed)


class Answers:
    """A peer's process that tells only what its code has."""

    avx512 = False

    def __init__(self, adapter: str, *_: object, preload: Path | None = None) -> None:
        self.preload = preload

    def ask(self, command: str, **_: Any) -> dict[str, bool]:
        return {"avx512": self.avx512}

    def pause(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("avx512", [False, True])
def test_a_peer_that_has_avx512_is_not_compared_with_engines_held_to_avx2(
    avx512: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "PeerProcess", Answers)
    monkeypatch.setattr(Answers, "avx512", avx512)
    monkeypatch.setenv("TAPEOUT_PEERS", str(tmp_path))
    ours = next(iter(run.our_systems(["default=a"], "avx2")))
    peer = System("peer", "x", "ik-llama", "q8_0", 8)
    for isa in ("", "avx2"):
        harness = run.Harness(run.arguments(["--ours", "default=a", *(["--isa", isa] if isa else [])]), print)
        harness.open({ours: tmp_path, peer: tmp_path})
        refused = bool(isa) and avx512
        assert ("peer" in harness.processes, "peer" in harness.failures) == (not refused, refused)
        assert "tapeout default" in harness.processes
        found = {name: process.preload for name, process in harness.processes.items() if isinstance(process, Answers)}
        assert found["tapeout default"] is None and (bool(found.get("peer")) == bool(isa) or refused)
