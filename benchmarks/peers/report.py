"""Write docs/benchmarks/cpu.md, .svg and .json from the figures of a run. Nothing here measures or decides."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.judge import (
    FOUR_BIT_LIMIT,
    NEAR_LOSSLESS_KL,
    Bar,
    Measured,
    Workload,
    bars,
    classes,
    dominated_bundles,
    dominators,
    paired_ratio,
    roofline_share,
)
from pipeline.report.svg import Canvas, Scale, label, standalone, ticks
from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError

KL_FLOOR = 1e-6  # position of a KL of zero on the logarithmic axis
WIDTH, PANEL_HEIGHT = 720.0, 250.0


class Run(Frozen):
    """All figures of one run, enough to write the page again. ``failures``: why a peer or a figure of it is missing."""

    systems: tuple[Measured, ...]
    failures: dict[str, str]
    bandwidth_gb_s: float
    threads: int
    rounds: int
    prompt_tokens: int
    new_tokens: int
    documents: int
    machine: str
    model: str


def machine() -> str:
    """The name of the processor, the operating system and the architecture; nothing that identifies the owner."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{name}, {platform.system()} {platform.machine()}"


def write(run: Run, folder: Path) -> None:
    """Write the three files. :class:`EvidenceError` if none of our bundles was measured."""
    if not any(m.ours and m.samples for m in run.systems):
        raise EvidenceError(
            "none of our bundles was measured", expected="at least one", remedy="; ".join(run.failures.values())
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.json").write_text(run.model_dump_json(indent=1) + "\n")
    (folder / "cpu.svg").write_text(standalone(plot(run)))
    (folder / "cpu.md").write_text(page(run))


def workloads(run: Run) -> list[Workload]:
    """Every workload that any system was timed on, decode first, by size."""
    return sorted({Workload(s.phase, s.size) for m in run.systems for s in m.samples})


def page(run: Run) -> str:
    decodes = [workload for workload in workloads(run) if workload.phase == "decode"]
    sections = [
        "# Against other engines on this processor",
        "This page is written by `make bench-peers`; do not edit it. [cpu.json](cpu.json) has the raw figures of every "
        "round.",
        _conditions(run),
        "## Speed, quality and memory",
        _table(run),
        _legend(),
        "![Speed against KL, one panel for each batch size](cpu.svg)",
        "## Bars",
        "The rivals of a bundle are the peers in its class. A ratio is the median of the ratios of the single rounds. "
        "The table names the rival with the smallest ratio.",
        _bars(bars(run.systems, run.bandwidth_gb_s * 1e9)),
        "## Domination",
        "\n".join(_domination(run, workload) for workload in decodes),
        "## Ratios",
        "The speed of each of our bundles divided by the speed of every engine: the median of the ratios of the single "
        "rounds.",
        _ratios(run),
        "## Versions",
        _versions(run.systems),
    ]
    if run.failures:
        lines = [f"- **{name}**: {reason}" for name, reason in run.failures.items()]
        sections += ["## What could not be measured", "\n".join(lines)]
    return "\n\n".join(sections) + "\n"


def _conditions(run: Run) -> str:
    return (
        f"{run.model} on {run.machine}: {run.threads} threads for each engine, {run.bandwidth_gb_s:.1f} GB/s measured "
        f"read bandwidth. Decode is greedy, with prompts of {run.prompt_tokens} tokens and {run.new_tokens} generated "
        f"tokens. There are {run.rounds} rounds. In each round all engines take turns, and only one runs at a time. "
        "Figures are medians over rounds. KL and top-token agreement are against our float bundle on the same "
        f"{run.documents} held-out passages."
    )


def _legend() -> str:
    lines = [
        f"Class near-lossless: KL at most {NEAR_LOSSLESS_KL}.",
        "Class 4-bit: peers with a 4-bit format, and our bundles with at most "
        f"{FOUR_BIT_LIMIT} bits per weight, scales and embeddings included, which is the size of llama.cpp Q4_K_M. In "
        "this class a peer is a rival only if our KL is no higher than the peer's.",
        "An engine may be in both classes. An engine marked *unclassed* is measured and compared, but is in no class: "
        "llama.cpp on the file that our float reference came from.",
        "Decode: only the steps in which every sequence gains one token are counted.",
        "Prefill: one prompt, until its first token is chosen.",
        "Peak MB: peak memory of the whole process over all timed work, libraries and interpreter included.",
        "Logits: OpenVINO's come from its runtime on the same model file with the same properties, because its "
        "continuous batching gives no logits of a prompt. All others come from the timed engine itself.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _table(run: Run) -> str:
    columns = workloads(run)
    head = ["engine", "class", "KL", "top token", *(str(w) for w in columns), "roofline", "peak MB", "weights MB"]
    rows: list[list[str]] = []
    for m in sorted(run.systems, key=lambda m: not m.ours):
        share = roofline_share(m, run.bandwidth_gb_s * 1e9)
        rows.append(
            [
                f"**{m.name}**" if m.ours else m.name,
                " and ".join(classes(m)) or ("unclassed" if m.unclassed else "none"),
                "-" if m.kl is None else f"{m.kl:.4f}",
                "-" if m.top_token is None else f"{m.top_token:.1%}",
                *(_number(m.speed(w)) for w in columns),
                "-" if share is None else f"{share:.0%}",
                f"{m.peak_bytes / 1e6:,.0f}",
                f"{m.file_bytes / 1e6:,.0f}",
            ]
        )
    return "Speeds are in tokens per second.\n\n" + _markdown(head, rows)


def _bars(found: Sequence[Bar]) -> str:
    rows = [
        [bar.name, bar.class_name, bar.what, _number(bar.value), _bound(bar), bar.peer or "-", _met(bar.met)]
        for bar in found
    ]
    if not rows:
        return "None of our bundles is in a class, so there is no bar."
    return _markdown(["bundle", "class", "what", "value", "bar", "rival", "met"], rows)


def _bound(bar: Bar) -> str:
    return f"at most {_number(bar.bound)}" if bar.what.startswith("peak") else f"at least {_number(bar.bound)}"


def _met(met: bool | None) -> str:
    return "no rival measured" if met is None else "yes" if met else "**no**"


def _domination(run: Run, workload: Workload) -> str:
    try:
        found = dominators(run.systems, workload)
    except ValueError as error:
        return f"- {workload}: unknown, because {error}."
    none = "no engine has both a higher speed and a lower KL than all our bundles"
    text = f"all our bundles are dominated by {', '.join(found)}" if found else none
    pairs = [f"{ours} by {peer}" for peer, ours in dominated_bundles(run.systems, workload)]
    return f"- {workload}: {text}." + (f" Single bundles that are dominated: {'; '.join(pairs)}." if pairs else "")


def _ratios(run: Run) -> str:
    columns = workloads(run)
    rows: list[list[str]] = []
    for ours in (m for m in run.systems if m.ours):
        for peer in (m for m in run.systems if not m.ours):
            pairs = [(ours.speeds(w), peer.speeds(w)) for w in columns]
            cells = [f"{paired_ratio(mine, theirs):.2f}" if mine and theirs else "-" for mine, theirs in pairs]
            rows.append([ours.name, peer.name, *cells])
    return _markdown(["bundle", "engine", *map(str, columns)], rows)


def _versions(systems: Iterable[Measured]) -> str:
    lines = [f"- {m.name}: {', '.join(f'{k} {v}' for k, v in sorted(m.versions.items()))}" for m in systems]
    return "\n".join(lines)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def plot(run: Run) -> str:
    """Decode speed against KL, one panel for each batch size. The KL axis is logarithmic. Up and left is better."""
    panels = [workload for workload in workloads(run) if workload.phase == "decode"]
    systems = [m for m in run.systems if m.kl is not None]
    if not panels or not systems:
        raise EvidenceError("no engine has both a decode speed and a KL", expected="at least one to draw")
    logs = [math.log10(max(m.kl or 0.0, KL_FLOOR)) for m in systems]
    low, high = math.floor(min(logs)), math.ceil(max(*logs, math.log10(NEAR_LOSSLESS_KL)) + 0.01)
    canvas = Canvas(
        WIDTH,
        40 + PANEL_HEIGHT * len(panels),
        "Speed against KL from the float model",
        "; ".join(_domination(run, workload).removeprefix("- ") for workload in panels),
    )
    canvas.legend([("candidate", "Tapeout"), ("baseline", "other engines")], 0, 34)
    x = Scale(low, high, 56, WIDTH - 190)
    for i, workload in enumerate(panels):
        _panel(canvas, workload, systems, x, top=62 + PANEL_HEIGHT * i)
    return canvas.render()


def _panel(canvas: Canvas, workload: Workload, systems: Sequence[Measured], x: Scale, top: float) -> None:
    points = [(m, speed) for m in systems if (speed := m.speed(workload)) is not None]
    bottom = top + PANEL_HEIGHT - 60
    y = Scale(0, 1.1 * max((speed for _, speed in points), default=1.0), bottom, top)
    for tick in ticks(y.low, y.high):
        canvas.line(x.start, y(tick), x.end, y(tick), "axis" if tick == 0 else "grid")
        canvas.text(x.start - 6, y(tick) + 4, label(tick), "soft", "end")
    for power in range(int(x.low), int(x.high) + 1):
        canvas.line(x(power), top, x(power), bottom, "grid")
        canvas.text(x(power), bottom + 16, label(10.0**power), "soft", "middle")
    canvas.text(x.start, top - 8, f"{workload}: tokens/s", "title")
    canvas.text(x.end, bottom + 32, "KL, nats per token; lower is better", "soft", "end")
    limit = x(math.log10(NEAR_LOSSLESS_KL))
    canvas.line(limit, top, limit, bottom, "limit")
    labels: list[float] = []
    for m, speed in sorted(points, key=lambda point: -point[1]):
        point_x, point_y = x(math.log10(max(m.kl or 0.0, KL_FLOOR))), y(speed)
        style = "candidate" if m.ours else "baseline"
        canvas.circle(point_x, point_y, 6 if m.ours else 4.5, style, f"{m.name}: {speed:,.0f} tokens/s, KL {m.kl:.2g}")
        # The names are a column beside the panel, fastest first. A name that would overlap the last one moves down.
        label_y = max(point_y + 4, labels[-1] + 14) if labels else max(point_y + 4, top + 4)
        labels.append(label_y)
        canvas.line(point_x, point_y, x.end + 4, label_y - 4, "grid")
        canvas.text(x.end + 8, label_y, m.name, "title tiny" if m.ours else "soft tiny")
