"""ik_llama.cpp, the fastest fork of llama.cpp on CPU: a build of it, which ``$TAPEOUT_IK_LLAMA`` names.

Its programs are run, since the C structures of its library change without a version. Each command is a run of
llama-batched-bench, which loads the model, repacks the weights (``-rtr``, its fastest layout) and warms up before it
times. It has no logits to give; weights are quantized by the same formats as llama.cpp's.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters.wire import Decoded, serve

MODEL = "model.gguf"
PROMPT_BATCH, MICRO_BATCH = 2048, 512
# PP, TG, B, N_KV, T_PP s, S_PP t/s, T_TG s, S_TG t/s, T s, S t/s
ROW = re.compile(r"^\|\s*(\d+) \|\s*(\d+) \|\s*(\d+) \|\s*\d+ \|\s*([\d.]+) \|\s*[\d.]+ \|\s*([\d.]+) \|", re.MULTILINE)


def run(program: str, *words: str) -> str:
    """What a program of the build prints; ``RuntimeError`` with the end of its log if it fails."""
    build = Path(os.environ["TAPEOUT_IK_LLAMA"]).resolve()
    paths = f"{build}:{build / 'bin'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    path = next((p for p in (build / program, build / "bin" / program) if p.is_file()), build / program)
    environment = {**os.environ, "LD_LIBRARY_PATH": paths}
    with tempfile.TemporaryDirectory() as folder:  # it writes llama.log there
        done = subprocess.run([path, *words], capture_output=True, text=True, env=environment, cwd=folder)
    if done.returncode == -signal.SIGILL:
        raise RuntimeError(f"{program} has instructions that this processor lacks: build it here")
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout + done.stderr  # where the table is printed differs from build to build


class IkLlama:
    def prepare(self, checkpoint: Path, source: Path, folder: Path, variant: str) -> None:
        if source.suffix != ".gguf":
            raise ValueError(f"{source} is not a GGUF file, from which the variants are made")
        if source.stem.upper().endswith(f"-{variant.upper()}"):  # it is of this format
            (folder / MODEL).symlink_to(source.resolve())
            return
        run("llama-quantize", "--allow-requantize", str(source), str(folder / MODEL), variant, "2")

    def load(self, folder: Path, variant: str, threads: int, max_batch: int, max_tokens: int) -> dict[str, Any]:
        self._path, self._threads = folder / MODEL, threads
        library = ctypes.CDLL(str(next(Path(os.environ["TAPEOUT_IK_LLAMA"]).resolve().rglob("libggml.so"))))
        return {"file_bytes": self._path.stat().st_size, "avx512": bool(library.ggml_cpu_has_avx512())}

    def _seconds(self, batch: int, prompt: int, new_tokens: int) -> tuple[float, float]:
        """Of all prompts, and of ``new_tokens`` steps."""
        context = batch * (-(-(prompt + new_tokens) // 256) * 256)
        sizes = {"-c": context, "-b": PROMPT_BATCH, "-ub": MICRO_BATCH, "-t": self._threads, "-tb": self._threads}
        sizes |= {"-npp": prompt, "-ntg": new_tokens, "-npl": batch}
        words = [str(word) for pair in sizes.items() for word in pair]
        text = run("llama-batched-bench", "-m", str(self._path), *words, "-rtr")
        for found in ROW.finditer(text):
            if tuple(map(int, found.group(1, 2, 3))) == (prompt, new_tokens, batch):
                return float(found[4]), float(found[5])
        raise RuntimeError(f"llama-batched-bench printed no row for {batch} x {prompt} + {new_tokens}: {text[-500:]}")

    def prefill(self, tokens: Sequence[int]) -> float:
        return self._seconds(1, len(tokens), 1)[0]

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        return Decoded(self._seconds(len(prompts), len(prompts[0]), new_tokens)[1], new_tokens, [])

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        raise NotImplementedError("llama-batched-bench gives no logits")


if __name__ == "__main__":
    serve(IkLlama())
