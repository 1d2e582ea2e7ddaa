"""What the kernel of a bundle's library draws from logits, compared with numpy: the server's sampler with both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engines.bundle import EngineBundle
from engines.kernels.sampling import Sampler
from engines.load import find_target
from engines.protocol import FloatArray
from runtime.engine.sampling import BatchSampler, SampledToken
from runtime.wire.messages import GenerateRequest, SamplingSettings
from tapeout.artifact import Artifact

SEEDS = range(8)
THREADS = 2
LOGPROBS = 20
# Temperatures are above 1, so that filters have something to cut off. `_request` adds what depends on the logits.
SETTINGS: Mapping[str, SamplingSettings] = {
    "temperature": SamplingSettings(temperature=1.5),
    "top_k": SamplingSettings(temperature=2, top_k=20),
    "top_p": SamplingSettings(temperature=1.5, top_p=0.8),
    "min_p": SamplingSettings(temperature=2, min_p=0.02),
    "all_filters": SamplingSettings(temperature=2, top_k=50, top_p=0.9, min_p=0.01),
    "penalties": SamplingSettings(temperature=1.5, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.5),
    "greedy": SamplingSettings(presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.5),
    "logit_bias": SamplingSettings(temperature=1),
    "logprobs": SamplingSettings(temperature=1),
}


def draw_counts(bundle: Artifact[EngineBundle], logits: FloatArray) -> dict[str, tuple[int, int]]:
    """How many tokens were drawn and how many of them differ, by name of :data:`SETTINGS`.

    One response to each setting and seed, whose logits are the rows of ``logits``: ``[P, V]``.

    ``bundle``: as :func:`engines.load.at_level` gives it. Nothing where it has no library.
    """
    kernels = find_target(bundle.record.target).serving_kernels
    library = kernels.library(bundle)
    kernel = None if library is None else kernels.sampler(library, logits.shape[1], THREADS)
    return {} if kernel is None else compared(kernel, logits)


def compared(kernel: Sampler, logits: FloatArray) -> dict[str, tuple[int, int]]:
    """:func:`draw_counts` of a library that is open."""
    requests = {f"{name} {seed}": _request(name, seed, logits) for name in SETTINGS for seed in SEEDS}
    native, numpy = (_responses(one, requests, logits) for one in (kernel, None))
    found: dict[str, tuple[int, int]] = {}
    for name in SETTINGS:
        own = [id for id in requests if id.rpartition(" ")[0] == name]
        pairs = [pair for id in own for pair in zip(native[id], numpy[id], strict=True)]
        found[name] = len(pairs), sum(a != b for a, b in pairs)
    return found


def _request(name: str, seed: int, logits: FloatArray) -> GenerateRequest:
    likeliest: list[int] = logits.argmax(axis=1).tolist()
    bias: dict[int, float] = {}
    if name == "logit_bias":  # the likeliest tokens are excluded, and others made likely
        bias = dict.fromkeys(likeliest, -100.0) | dict.fromkeys(range(8), 12.5)
    return GenerateRequest(
        id=f"{name} {seed}",
        prompt=likeliest,
        max_new_tokens=len(logits),
        sampling=replace(SETTINGS[name], seed=seed, logit_bias=bias),
        stop_tokens=frozenset({0}),
        logprobs=LOGPROBS if name == "logprobs" else None,
    )


def _responses(
    kernel: Sampler | None, requests: Mapping[str, GenerateRequest], logits: FloatArray
) -> dict[str, list[SampledToken]]:
    sampler = BatchSampler(logits.shape[1], kernel=kernel)
    for request in requests.values():
        sampler.add(request)
    steps = [sampler.choose(list(requests), [row] * len(requests)) for row in logits]
    return {id: [step[number] for step in steps] for number, id in enumerate(requests)}
