"""Calibration: which samples of text were read, and what the linears and the KV cache saw while reading them.

A Gram matrix is kept in B square blocks along its diagonal, each of k channels: ``gram_blocks`` says how many. It costs
B k² bytes for K channels instead of K². Between channels of different blocks nothing is known.

The folder holds, in safetensors (K = B k: input channels of a group; D: head size):

``statistics/layer-NNN.safetensors``, one per layer, and ``statistics/head.safetensors`` for groups outside layers
    ``GROUP.gram``, ``GROUP.gram_holdout``  int16 ``[B, k (k - 1) / 2]``  correlations of the input channels over the
        fit samples and over the held-out samples (the last quarter): what is fitted on one is judged on the other
    ``GROUP.gram_power``, ``GROUP.gram_holdout_power``  ``[K]``  mean over tokens of ``x²``. Together they are the Gram
        matrices, the mean of ``x xᵀ`` (``unpack_gram`` of statistics.py); these and all that follow are float32
    ``GROUP.mean_abs``, ``GROUP.max_abs``  ``[K]``  mean and maximum of ``|x|`` over the fit samples
    ``layers.N.k_absmax``, ``layers.N.v_absmax``  ``[kv_heads, D]``  maximum over every token of every sample; keys are
        taken after the rotary embedding, as the cache stores them
    ``layers.N.k_pair_absmax``  ``[kv_heads, D]``  maximum of ``sqrt(k_d² + k_e²)``, e being the channel the rotary
        embedding turns d into: a bound on both that no position can exceed. ``|k_d|`` where d is not rotated
``GROUP.*`` of experts
    all of these with a dimension for the experts in front, of the tokens that chose each, weighted by the square of
    their routing weight: so much of an expert's error comes into the output. ``GROUP.visits``, int64 ``[2, experts]``,
    counts these tokens in the fit samples and in the held-out ones. An expert with fewer than ``calibrate.min_visits``
    is starved: what it lacks is filled up with the mean over other tokens of the layer. What experts compute
    themselves, the inputs of their second projection, is what this expert makes of tokens that did not choose it.
``samples.jsonl``
    a ``CalibrationSample`` per sample, never its text
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar

from tapeout.artifact import Frozen, ParentTypes, Record, canonical_json
from tapeout.recipe import Calibrate

SAMPLES_FILE = "samples.jsonl"
HEAD_FILE = "statistics/head.safetensors"
# Of a block of a Gram matrix, at most. In one block of K channels disk and memory grow with K², a Cholesky factor with
# K³: the search of one group of a model of 8 billion parameters would take 5.8 GB (docs/benchmarks/scale.md).
BLOCK_CHANNELS = 3584
# Of an expert's: it sees few tokens, which say little of many channels, and there may be thousands of experts.
EXPERT_BLOCK_CHANNELS = 256


class CalibrationSample(Frozen):
    sample_hash: str
    tokens: int
    holdout: bool


class ExpertVisits(Frozen):
    """Tokens that chose each expert of a layer, which both its projections read."""

    groups: tuple[str, ...]  # by their names in the PortableGraph
    fit: tuple[int, ...]  # in the samples that methods are fitted to
    holdout: tuple[int, ...]

    def starved(self, min_visits: int) -> tuple[int, ...]:
        """Experts with fewer visits than that.

        >>> ExpertVisits(groups=("layers.0.experts_up",), fit=(300, 2), holdout=(80, 0)).starved(256)
        (1,)
        """
        return tuple(expert for expert, visits in enumerate(self.fit) if visits < min_visits)

    def note(self, min_visits: int) -> str:
        """Which experts are starved, for the log and the report; empty: none."""
        starved = self.starved(min_visits)
        if not starved:
            return ""
        return (
            f"{', '.join(self.groups)}: {len(starved)} of {len(self.fit)} experts ({', '.join(map(str, starved))}) "
            f"were chosen by fewer than {min_visits} tokens of calibration; tokens of the layer that did not choose "
            "them stand in for what they lack"
        )


class Calibration(Record):
    artifact_type: ClassVar[str] = "Calibration"
    schema_version: ClassVar[int] = 6
    remedy: ClassVar[str] = "run `dvc repro calibrate`"
    parent_types: ClassVar[ParentTypes] = {"graph": ("PortableGraph",)}

    asked: Calibrate  # by the recipe
    samples_hash: str  # sha256 of the sample hashes, in order
    samples: int
    holdout_samples: int  # the last ones
    tokens_per_sample: int  # samples are cut here; shorter ones are used whole
    tokens: int  # in all samples together
    layers: int
    statistics: tuple[str, ...]  # files, one per layer and the head's
    visits: tuple[ExpertVisits, ...] = ()  # of every layer that has experts
    versions: dict[str, str]


def gram_blocks(channels: int, largest: int | None = None) -> int:
    """How many equal blocks a Gram matrix is kept in: 1 where no small number of them divides the channels.

    ``largest``: channels of a block, ``BLOCK_CHANNELS`` unless given.

    >>> [gram_blocks(channels) for channels in (1536, 8192, 11008, 14336, 4099)]
    [1, 4, 4, 4, 1]
    >>> [gram_blocks(channels, EXPERT_BLOCK_CHANNELS) for channels in (64, 768, 2880)]
    [1, 3, 12]
    """
    least = -(-channels // (largest or BLOCK_CHANNELS))
    return next((count for count in range(least, 4 * least) if channels % count == 0), 1)


def layer_file(layer: int) -> str:
    """Where a layer's statistics lie in the artifact.

    >>> layer_file(7)
    'statistics/layer-007.safetensors'
    """
    return f"statistics/layer-{layer:03d}.safetensors"


def statistics_file(group: str) -> str:
    """Where a group's statistics lie, by its name in the PortableGraph.

    >>> statistics_file("layers.12.gate_up"), statistics_file("lm_head")
    ('statistics/layer-012.safetensors', 'statistics/head.safetensors')
    """
    parts = group.split(".")
    return layer_file(int(parts[1])) if parts[0] == "layers" else HEAD_FILE


def sample_hash(tokens: Sequence[int]) -> str:
    """sha256 of the token ids as canonical JSON, so a sample can be matched with evaluated documents."""
    return hashlib.sha256(canonical_json([int(token) for token in tokens])).hexdigest()


def samples_hash(samples: Sequence[CalibrationSample]) -> str:
    """One hash for exactly these samples in this order."""
    return hashlib.sha256(canonical_json([sample.sample_hash for sample in samples])).hexdigest()
