"""What engines of ``cuda`` should reach on a GPU, beside what a run has measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Found = Mapping[str, Sequence[Mapping[str, Any]]]  # by part, what it recorded
NOT_RUN = "has not run"
# Median inter-token times of vLLM, Llama-3.1-8B in bf16 on an H100 80 GB, by concurrent sequences: ML.ENERGY's data
# (github.com/ml-energy/leaderboard, commit 0cd52da).
VLLM_MS = {8: 7.32, 32: 8.91, 128: 16.5}
VLLM_GPU = "H100"
PEERS_GRAPH, INT4 = "torch bf16 in a graph", "_weight_int4pack_mm"


@dataclass(frozen=True)
class Goal:
    """``first``, ``final``: least values, unless the goal is a time. ``measured``: None where it has not run."""

    what: str
    first: str
    final: str
    measured: Callable[[Found], str | None]


def lines(found: Found, part: str, name: str, **of: Any) -> Iterator[Mapping[str, Any]]:
    """What a part recorded under a name, with these values."""
    for line in found.get(part, ()):
        if line["name"] == name and all(line.get(key) == value for key, value in of.items()):
            yield line


def first(found: Found, part: str, name: str, key: str, **of: Any) -> float | None:
    return next((line[key] for line in lines(found, part, name, **of) if key in line), None)


def table(found: Found) -> str:
    """Markdown."""
    rows = [f"| {goal.what} | {goal.first} | {goal.final} | {goal.measured(found) or NOT_RUN} |" for goal in GOALS]
    return "\n".join(("| | first goal | final goal | measured |", "|---|--:|--:|--:|", *rows))


def _share(batch: int) -> Callable[[Found], str | None]:
    """Of the time that reading weights and cache takes at the bandwidth of a copy."""

    def measured(found: Found) -> str | None:
        of: dict[str, Any] = {"batch": batch, "graph": True}
        ms, size = (first(found, "steps", "decode", key, **of) for key in ("ms", "read_bytes"))
        rate = first(found, "machine", "copy", "bytes_per_s")
        return None if ms is None or size is None or rate is None else f"{1e3 * size / rate / ms:.2f}"

    return measured


def _against(batch: int, peer_ms: Callable[[Found], float | None]) -> Callable[[Found], str | None]:
    def measured(found: Found) -> str | None:
        ours, other = first(found, "steps", "decode", "ms", batch=batch, graph=True), peer_ms(found)
        return None if ours is None or other is None else f"{other / ours:.2f}x"

    return measured


def _torch_ms(batch: int) -> Callable[[Found], float | None]:
    return lambda found: first(found, "steps", "decode", "ms", batch=batch, peer=PEERS_GRAPH)


def _vllm_ms(batch: int) -> Callable[[Found], float | None]:
    def of_this_gpu(found: Found) -> float | None:
        name = next((str(line["found"]) for line in lines(found, "machine", "gpu")), "")
        return VLLM_MS[batch] if VLLM_GPU in name else None

    return of_this_gpu


def _linears(found: Found) -> str | None:
    """The least of all sizes."""
    ratios = list[float]()
    for ours in lines(found, "linears", "linear"):
        if "ours" in ours and ours["M"] <= 16:
            peer = first(found, "linears", "linear", "ms", peer=INT4, linear=ours["linear"], M=ours["M"])
            ratios += [peer / ours["ms"]] if peer else []
    return f"{min(ratios):.2f}x" if ratios else None


def _attention(found: Found) -> str | None:
    """The most of all sizes: few keys fill no GPU."""
    rates = [line["bytes_per_s"] for line in lines(found, "attention", "attention", ours="int8")]
    copy = first(found, "machine", "copy", "bytes_per_s")
    return f"{max(rates) / copy:.2f}" if rates and copy else None


def _prefill(found: Found) -> str | None:
    ms, flop = (first(found, "steps", "prefill", key, tokens=2048) for key in ("ms", "flop"))
    rate = first(found, "machine", "bf16 matmul", "flop_per_s")
    return None if ms is None or flop is None or rate is None else f"{1e3 * flop / ms / rate:.2f}"


def _host(found: Found) -> str | None:
    times = [line["host_ms"] for line in lines(found, "steps", "decode", graph=True) if "host_ms" in line]
    return f"{max(times):.2f} ms" if times else None


def _invariant(found: Found) -> str | None:
    checks = [line["holds"] for line in found.get("engine", ()) if line["name"].startswith("the same bits")]
    return None if not checks else "bitwise" if all(checks) else "differs"


SHARES = ((1, "0.60", "0.78"), (8, "0.60", "0.75"), (32, "0.55", "0.70"), (128, "0.45", "0.60"))
GOALS = (
    *(
        Goal(f"4-bit decode, batch {batch}: share of the roofline", least, most, _share(batch))
        for batch, least, most in SHARES
    ),
    *(
        Goal(f"step against torch bf16 in a CUDA graph, batch {batch}", least, most, _against(batch, _torch_ms(batch)))
        for batch, least, most in ((1, "2.0x", "3.0x"), (32, "1.8x", "2.3x"))
    ),
    *(
        Goal(f"step against vLLM's published bf16 step on an H100, batch {batch}", least, most,
             _against(batch, _vllm_ms(batch)))
        for batch, least, most in ((8, "2.5x", "3.3x"), (32, "2.2x", "2.9x"), (128, "1.7x", "2.3x"))
    ),
    Goal("4-bit linear of up to 16 tokens against torch's `_weight_int4pack_mm`", "1.0x", "1.2x", _linears),
    Goal("attention in decode, 8-bit KV: share of a copy's bandwidth", "0.60", "0.80", _attention),
    Goal("prefill of 2,048 tokens: share of the bf16 matmul rate", "0.45", "0.70", _prefill),
    Goal("host time of a decode step outside the driver", "0.5 ms", "0.1 ms", _host),
    Goal("decode alone and in a batch", "bitwise", "bitwise", _invariant),
)  # fmt: skip
