"""The output of every linear of a ``cuda`` bundle, and its embedding, as the device computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from engines.bundle import BLOCK_TOKENS, EngineBundle
from engines.kernels.cuda.layout import RUN_RESULTS
from engines.kernels.cuda.library import DeviceStep
from engines.protocol import FloatArray, IntArray
from engines.targets.cuda.engine import open_device, plan_of
from tapeout.artifact import Artifact

TRACED = {"linear": np.float32, "attention": np.float16}  # operations, and what they write


class CudaProbe:
    """See :class:`engines.target.Probe`. A document is fed in pieces of as many tokens as may have logits."""

    def __init__(self, bundle: Artifact[EngineBundle]) -> None:
        self._record, self._plan = bundle.record, plan_of(bundle)
        self._columns = -(-self._record.io.max_tokens // BLOCK_TOKENS)
        self._device = open_device(bundle, self._plan, self._columns)
        self._attention: dict[str, FloatArray] = {}

    def __call__(self, tokens: Sequence[int]) -> tuple[FloatArray, dict[str, FloatArray]]:
        traced = [one.pointers["y"] if one.kind in TRACED else "" for one in self._plan.operations]
        values = dict[str, np.ndarray]()
        for one in self._plan.operations:
            if one.kind in TRACED:
                dtype, name = np.dtype(TRACED[one.kind]), one.pointers["y"]
                values[name] = np.empty((len(tokens), self._plan.values[name].row_bytes // dtype.itemsize), dtype)
        for start in range(0, len(tokens), RUN_RESULTS):
            piece = tokens[start : start + RUN_RESULTS]
            outputs = [values[name][start : start + len(piece)] if name else None for name in traced]
            self._device.trace(self._step(piece, start), outputs)
        found, behind = dict[str, FloatArray](), self._plan.behind_attention
        self._attention = {}
        for linear in self._record.linear_outputs:
            edges = np.cumsum((0, *linear.rows))
            for weight, begin, end in zip(linear.weights, edges, edges[1:], strict=False):
                found[weight] = values[linear.value][:, begin:end]
                if linear.value in behind:
                    self._attention[weight] = values[behind[linear.value]].astype(np.float32)
        return values[self._plan.logits], found

    def attention(self) -> Mapping[str, FloatArray]:
        """Of kernels that round queries, weights of the softmax and results to float16."""
        return self._attention

    def states(self) -> Mapping[str, FloatArray]:
        """None: models with recurrent state are refused."""
        return {}

    def choices(self) -> Mapping[str, IntArray]:
        """None: models with experts are refused."""
        return {}

    def embedding(self) -> Iterator[FloatArray]:
        """Of :data:`RUN_RESULTS` tokens at a time; only the gather runs."""
        vocabulary = self._record.io.vocab_size
        number, gather = next((n, one) for n, one in enumerate(self._plan.operations) if one.kind == "gather")
        columns = self._plan.values[gather.pointers["y"]].row_bytes // 4
        for first in range(0, vocabulary, RUN_RESULTS):
            ids = range(first, min(first + RUN_RESULTS, vocabulary))
            rows = np.empty((len(ids), columns), np.float32)
            self._device.trace(self._step(ids, 0), [*[None] * number, rows])
            yield rows

    def _step(self, tokens: Sequence[int], start: int) -> DeviceStep:
        count = len(tokens)
        return DeviceStep(
            ids=np.array(tokens, np.int64),
            rows=np.arange(count, dtype=np.int64),
            draws=None,
            offsets=np.array([0, count], np.int32),
            starts=np.array([start], np.int32),
            table=np.arange(self._columns, dtype=np.int32)[None],
            bucket=0,
            keys=start + count,
            few_tokens=0,
            most_tokens=count,
        )
