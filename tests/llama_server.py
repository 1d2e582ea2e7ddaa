"""llama.cpp's own server on a GGUF file: what it predicts after a prompt, for comparison with ours."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.peers.environments import peers_folder

EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
Predict = Callable[[Sequence[int]], NDArray[np.float64]]  # tokens in, log-probabilities [V] of the next one out


@contextmanager
def llama_server(model: Path, vocab_size: int) -> Generator[tuple[Predict, Callable[[str], list[int]]]]:
    """How it continues tokens, and how it cuts text into tokens. The test is skipped where the server is not built."""
    program = peers_folder() / "llama.cpp" / "bin" / "llama-server"
    if not program.is_file():
        pytest.skip(f"no {program}: `make bench-serving` builds it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = model.with_suffix(".log")
    with log.open("w") as output:
        command = [str(program), "--model", str(model), "--port", str(port), "--threads", "1", "--ctx-size", "512"]
        process = subprocess.Popen([*command, "--parallel", "1", "--no-warmup", *EXACT], stdout=output, stderr=output)

    def ask(path: str, **body: Any) -> Any:
        address, content = f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode() if body else None
        with urllib.request.urlopen(urllib.request.Request(address, content), timeout=60) as answer:
            return json.load(answer)

    def predict(tokens: Sequence[int]) -> NDArray[np.float64]:
        # A token that is no whole character is sent without probabilities, so one that is gets drawn. They are of the
        # logits before the bias.
        drawn = {"n_predict": 1, "temperature": 0, "logit_bias": [[tokenize("a")[0], 1000]], "ignore_eos": True}
        found = ask("completion", prompt=list(tokens), n_probs=vocab_size, cache_prompt=False, **drawn)
        values = np.full(vocab_size, np.nan)
        for entry in found["completion_probabilities"][0]["top_logprobs"]:
            values[entry["id"]] = entry["logprob"]
        return values

    def tokenize(text: str) -> list[int]:
        return ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {process.returncode}: {log.read_text()[-2000:]}")
            try:
                ask("health")
                break
            except OSError:
                time.sleep(0.1)
        yield predict, tokenize
    finally:
        process.kill()
        process.wait()
