"""How far live traffic is from the samples that an engine was calibrated on.

Distances, not tests, decide: a test of equality fires on any difference once there is enough traffic. But small samples
differ by chance, most of all in rare tokens. So exchanges and samples are mixed and divided again at random, and what
they differ by then is taken off.

N  exchanges and samples together      P  permutations      K  tokens that are counted one by one, and the rest
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.kernels.serving import Clipping
from evals.kinds.drift import KIND, Distance, DriftReport, DriftSettings
from tapeout.artifact import Artifact, canonical_json
from tapeout.errors import EvidenceError
from tapeout.progress import ProgressBar

PERMUTATIONS = 199
COUNTED_TOKENS = 2000  # the commonest of both; all others count as one
Tokens = Sequence[Sequence[int]]
ClipCounter = Callable[[Sequence[int]], Clipping]  # of a text
Floats = NDArray[np.float64]
Choice = NDArray[np.bool_]  # which of the N are live, ``[N]``


def drift(
    settings: DriftSettings,
    live: Tokens,
    samples: Tokens,
    folder: Path,
    *,
    calibration: Artifact[Any],
    seed: int = 0,
    clip_counts: ClipCounter | None = None,
) -> Artifact[DriftReport]:
    """Write a :class:`DriftReport` of token ids: exchanges, the latest last, and calibration samples.

    ``clip_counts``: gives the values that an engine stores on static grids for a text, and how many it clips.
    """
    kept = list(live[-settings.exchanges :])
    record = DriftReport(
        exchanges=len(kept),
        samples=len(samples),
        live=hashlib.sha256(canonical_json([list(map(int, tokens)) for tokens in kept])).hexdigest(),
        enough=len(kept) >= settings.min_exchanges,
        distances=distances(settings, kept, samples, seed=seed, clip_counts=clip_counts),
    )
    return KIND.write(folder, record, parents={"calibration": calibration})


def distances(
    settings: DriftSettings, live: Tokens, samples: Tokens, *, seed: int = 0, clip_counts: ClipCounter | None = None
) -> tuple[Distance, ...]:
    """:class:`EvidenceError` where there is nothing to compare."""
    both = [*live, *samples]
    if not live or not samples or not all(both):
        raise EvidenceError(
            f"{len(live)} exchanges and {len(samples)} samples, some of them perhaps empty",
            expected="text on both sides",
            remedy="name the traffic log of a server that has answered calls (--traffic-log)",
        )
    is_live = np.arange(len(both)) < len(live)
    rng = np.random.default_rng(seed)
    mixed = [rng.permutation(is_live) for _ in range(PERMUTATIONS)]
    sizes = np.array([len(tokens) for tokens in both], dtype=np.float64)
    mean, counts = float(sizes[~is_live].mean()), _counts(both)

    def measured(name: str, title: str, bound: float, distance: Callable[[Choice], float], power: int) -> Distance:
        """``power``: of the distance, that chance adds to."""
        found, chance = distance(is_live), [distance(choice) for choice in mixed]
        above = found**power - float(np.mean(np.power(chance, power)))
        p_value = (1 + sum(one >= found for one in chance)) / (1 + PERMUTATIONS)
        return Distance(name=name, title=title, value=max(above, 0.0) ** (1 / power), p_value=p_value, bound=bound)

    def lengths(choice: Choice) -> float:
        from scipy.stats import wasserstein_distance

        return float(wasserstein_distance(sizes[choice], sizes[~choice])) / mean

    def histogram(choice: Choice) -> float:
        from scipy.spatial.distance import jensenshannon

        return float(jensenshannon(counts[choice].sum(axis=0), counts[~choice].sum(axis=0), base=2))

    found = [
        measured("lengths", "lengths", settings.max_lengths, lengths, 1),
        # A divergence is the square of its distance, and adds up.
        measured("tokens", "tokens", settings.max_tokens, histogram, 2),
    ]
    if clip_counts is not None:
        texts = ProgressBar(both, title="clipped values", unit="text")
        values = np.array([clip_counts(text) for text in texts], np.float64)
        for counts_of, name, title, bound in (
            (values[:, 0], "kv_clipped", "clipped KV values", settings.max_kv_clipped),
            (values[:, 1], "activations_clipped", "clipped activations", settings.max_activations_clipped),
        ):
            if counts_of[:, 0].all():
                found.append(measured(name, title, bound, partial(_more_clipped, counts_of), 1))
    return tuple(found)


def _more_clipped(counts: Floats, live: Choice) -> float:
    """The share among live texts, less that among samples: an engine clips a few values of those, too. ``[N, 2]``."""
    (stored, clipped), (others, clipped_of_others) = counts[live].sum(axis=0), counts[~live].sum(axis=0)
    return float(clipped / stored - clipped_of_others / others)


def _counts(texts: Tokens) -> Floats:
    """How often each text has each of the commonest tokens, and all others together, ``[N, K]``."""
    totals = np.bincount(np.concatenate([np.asarray(tokens) for tokens in texts]))
    common = np.argsort(-totals, kind="stable")[:COUNTED_TOKENS]
    place = np.full(len(totals), len(common))
    place[common] = np.arange(len(common))
    return np.stack([np.bincount(place[np.asarray(tokens)], minlength=len(common) + 1) for tokens in texts]).astype(
        np.float64
    )
