"""What an engine's core counts since it was opened, and the figures that it reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from engines.kernels.serving import Clippings
from engines.protocol import Engine, MapsWeights
from engines.weight_pages import major_faults
from runtime.engine.active import ActiveRequest
from runtime.engine.block_store import BlockStore
from runtime.engine.cache.blocks import BlockPool
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.work import Work
from runtime.engine.speculation import Counts
from runtime.wire.messages import EngineStats

CLIPPING_STEPS = 16  # between two reads of the kernels' counts of clipped values, of 10 µs each, while requests run

LOOK_SECONDS = 10.0  # between two looks at which weights are in memory, of 1 to 2 ms each


class CoreCounters:
    def __init__(self, clippings: Clippings, engine: Engine) -> None:
        self._clippings, self._clipped = clippings, clippings()
        self._reads = engine.capabilities.reads
        self._mapped_bytes = engine.capabilities.mapped_bytes
        self._maps = engine if self._mapped_bytes and isinstance(engine, MapsWeights) else None
        self._resident: int | None = None
        self._looked, self._faults = -math.inf, major_faults()
        self._ended = 0.0  # when the last step did
        self._finished: Counter[str] = Counter()
        self._prefix_queries = self._prefix_hits = self._prefix_lost = 0
        self._step_seconds, self._step_tokens, self._step_requests = 0.0, 0, 0
        self.steps = self.prompt_tokens = self.generated_tokens = 0

    def started(self, active: ActiveRequest, lost: int) -> None:
        """A request has its first step. ``lost``: see :meth:`Scheduler.lost_tokens`."""
        self._prefix_queries += len(active.request.prompt) + len(active.request.answered)
        self._prefix_hits += active.cached or 0
        self._prefix_lost += lost

    def stepped(self, works: Sequence[Work], started: float, ended: float) -> None:
        self.steps += 1
        self._step_seconds, self._ended = ended - max(started, self._ended), ended
        self._step_requests = len(works)
        self._step_tokens = sum(len(work.tokens) for work in works)

    def finished(self, reason: str) -> None:
        self._finished[reason] += 1

    def stats(
        self, scheduler: Scheduler, blocks: BlockPool, slots: BlockPool, store: BlockStore, drafts: Counts
    ) -> EngineStats:
        running = scheduler.running
        if not running or self.steps % CLIPPING_STEPS == 0:
            self._clipped = self._clippings()
        values, resident = self._clipped, self._resident_bytes()
        return EngineStats(
            running=running,
            waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            blocks=blocks.blocks,
            blocks_held=blocks.held,
            blocks_cached=blocks.cached,
            steps=self.steps,
            step_seconds=self._step_seconds,
            step_tokens=self._step_tokens,
            step_requests=self._step_requests,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=scheduler.preemptions,
            drafts=drafts.drafts,
            drafted_tokens=drafts.drafted,
            accepted_tokens=drafts.accepted,
            kv_values=values.kv.stored,
            kv_values_clipped=values.kv.clipped,
            activation_values=values.activations.stored,
            activation_values_clipped=values.activations.clipped,
            finished=dict(self._finished),
            slots=slots.blocks,
            slots_held=slots.held,
            slots_cached=slots.cached,
            prefix_lost=self._prefix_lost,
            blocks_fetched=store.fetched,
            blocks_sent=store.sent,
            fetches_failed=store.failed,
            mapped_bytes=0 if resident is None else self._mapped_bytes,
            resident_bytes=resident or 0,
            step_reads=self._reads(max(1, self._step_tokens)),
            page_faults=major_faults() - self._faults if self._maps else 0,
        )

    def _resident_bytes(self) -> int | None:
        """Of weights that are left in their file."""
        if self._maps is not None and self._ended >= self._looked + LOOK_SECONDS:
            self._resident, self._looked = self._maps.resident_bytes(), self._ended
        return self._resident
