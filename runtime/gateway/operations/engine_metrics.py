"""What Prometheus is told of engines: the last report of each, read when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.wire.messages import EngineInfo, EngineStats

# Name, help and attribute of what the engine counts, without _total.
ENGINE_COUNTERS = (
    ("vllm:num_preemptions", "Requests that gave up their KV blocks.", "preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in KV blocks.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in KV blocks.", "prefix_hits"),
    ("tapeout:prefix_cache_lost", "Prompt tokens computed for want of a snapshot of recurrent state.", "prefix_lost"),
    ("vllm:spec_decode_num_drafts", "Times that tokens were drafted.", "drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.", "drafted_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted_tokens"),
    ("tapeout:steps", "Steps of the engine.", "steps"),
    ("tapeout:blocks_fetched", "KV blocks that came from other engines.", "blocks_fetched"),
    ("tapeout:blocks_sent", "KV blocks that went to other engines.", "blocks_sent"),
    ("tapeout:fetches_failed", "Fetches of KV blocks that ended early; the rest was computed.", "fetches_failed"),
    (
        "tapeout:page_faults",
        "Pages from a disk that an engine waited for which leaves experts in their file.",
        "page_faults",
    ),
    ("tapeout:kv_values", "Keys and values written to a KV cache in int8 or int4.", "kv_values"),
    ("tapeout:kv_values_clipped", "Of those, beyond what the scales of calibration reach.", "kv_values_clipped"),
    ("tapeout:activation_values", "Activations quantized to int8 with static scales.", "activation_values"),
    (
        "tapeout:activation_values_clipped",
        "Of those, beyond what the scales of calibration reach.",
        "activation_values_clipped",
    ),
)


class EngineSeries(NamedTuple):
    """What Prometheus is told of one engine. ``engine``: the label. ``counted``: by attribute of the stats."""

    engine: str
    info: EngineInfo
    stats: EngineStats
    healthy: bool
    ready: bool
    generated_tokens: int
    counted: Mapping[str, int]


class EngineCollector(Collector):
    """``read_bandwidth``: see :class:`runtime.gateway.operations.metrics.Metrics`. ``series``: what there is now."""

    def __init__(self, model: str, read_bandwidth: float | None, series: Callable[[], Sequence[EngineSeries]]) -> None:
        self._model, self._read_bandwidth, self._series = model, read_bandwidth, series

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for series in self._series():
            self._collect(series, families)
        yield from families.values()

    def _collect(self, series: EngineSeries, families: dict[str, GaugeMetricFamily | CounterMetricFamily]) -> None:
        stats, info = series.stats, series.info
        labels = {"model_name": self._model, "engine": series.engine}

        def add(
            kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float, **more: Any
        ) -> None:
            if name not in families:
                families[name] = kind(name, text, labels=[*labels, *more])
            families[name].add_metric([*labels.values(), *map(str, more.values())], value)

        gauge, counter = partial(add, GaugeMetricFamily), partial(add, CounterMetricFamily)
        gauge("vllm:num_requests_running", "Requests that have KV blocks.", stats.running)
        gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.waiting)
        gauge("tapeout:waiting_tokens", "Prompt tokens in the queue.", stats.waiting_tokens)
        held = "KV blocks held by requests, 0 to 1; of a model without attention slots of recurrent state."
        gauge("vllm:kv_cache_usage_perc", held, kv_usage(stats))
        gauge("tapeout:kv_blocks_cached", "KV blocks kept for shared prefixes.", stats.blocks_cached)
        if stats.slots:
            gauge("tapeout:state_slots", "Slots of recurrent state.", stats.slots)
            gauge("tapeout:state_slots_held", "Slots of recurrent state held by requests.", stats.slots_held)
            gauge("tapeout:state_slots_cached", "Snapshots kept for shared prefixes.", stats.slots_cached)
            gauge("tapeout:state_slot_bytes", "Bytes of a slot of recurrent state.", info.slot_bytes)
        if info.mapped_bytes:
            gauge(
                "tapeout:mapped_bytes",
                "Bytes of the weights of experts that are left in their file.",
                info.mapped_bytes,
            )
        if (share := resident_share(stats)) is not None:
            gauge("tapeout:resident_share", "Of these bytes in memory, 0 to 1.", share)
        gauge("vllm:engine_healthy", "1 if the engine makes progress.", float(series.healthy))
        gauge("tapeout:ready", "1 if the server takes requests.", float(series.ready))
        cache = {"block_size": info.block_tokens, "num_gpu_blocks": info.blocks, "block_bytes": info.block_bytes}
        gauge("vllm:cache_config_info", "Size of the KV pool.", 1, **cache)
        engine = {"bundle": info.digest, "target": info.name, "threads": info.threads}
        gauge("tapeout:engine_info", "The bundle that is served.", 1, **engine)
        if self._read_bandwidth:
            share = bandwidth_share(stats, info, self._read_bandwidth)
            gauge("tapeout:bandwidth_share", "Bytes of weights and state of the last step over read bandwidth.", share)
        counter("vllm:generation_tokens", "Generated tokens.", series.generated_tokens)
        for name, text, attribute in ENGINE_COUNTERS:
            counter(name, text, series.counted[attribute])


def kv_usage(stats: EngineStats) -> float:
    """Share of the KV blocks that requests hold, 0 to 1; where there are none, of the slots of recurrent state."""
    held, all_of_them = (stats.blocks_held, stats.blocks) if stats.blocks else (stats.slots_held, stats.slots)
    return held / all_of_them if all_of_them else 0.0


def resident_share(stats: EngineStats) -> float | None:
    """Of the weights of experts that are left in their file, in memory; None where none are, or nobody knows."""
    return stats.resident_bytes / stats.mapped_bytes if stats.mapped_bytes else None


def bandwidth_share(stats: EngineStats, info: EngineInfo, read_bandwidth: float) -> float:
    """What the last step read of weights and rewrote of states, per second, over what the machine reads; 0 while idle.

    The KV cache does not count.
    """
    moved = info.weight_bytes * stats.step_reads + 2 * info.slot_bytes * stats.step_requests
    return moved / stats.step_seconds / read_bandwidth if stats.running and stats.step_seconds else 0.0
