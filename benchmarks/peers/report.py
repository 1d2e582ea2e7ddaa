"""Write a page of docs/benchmarks, its plot and its raw data from the figures of a run. Nothing here measures."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from benchmarks.peers.corpus import PREFILLS
from benchmarks.peers.judge import (
    FOUR_BIT_LIMIT,
    NEAR_LOSSLESS_KL,
    Bar,
    Kind,
    Measured,
    Workload,
    bars,
    classes,
    dominated_bundles,
    dominators,
    paired_ratio,
)
from benchmarks.peers.roofline import TURNS
from pipeline.report.vega import BASELINE, CANDIDATE, FAIL, RULE, draw, rows, rule, standalone
from tapeout.artifact import Frozen
from tapeout.errors import EvidenceError

KL_FLOOR = 1e-6  # position of a KL of zero on the logarithmic axis
PANEL_WIDTH, PANEL_HEIGHT = 460, 250
LINE = 16  # height of a line of text
KINDS = {True: "Tapeout", False: "other engines"}  # by whether an engine is ours


class Run(Frozen):
    """All figures of one run, enough to write the page again. ``failures``: why a peer or a figure of it is missing.

    ``note``: what the reader must know of figures that were corrected after the run.
    """

    systems: tuple[Measured, ...]
    failures: dict[str, str]
    threads: int
    rounds: int
    prompt_tokens: int
    new_tokens: int
    documents: int
    kind: Kind = "dense"
    machine: str
    model: str
    note: str = ""


def machine() -> str:
    """The name of the processor, the operating system and the architecture; nothing that identifies the owner."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{name}, {platform.system()} {platform.machine()}"


def write(run: Run, folder: Path, stem: str) -> None:
    """Write ``stem``.json and .md, and .svg where KL is known. :class:`EvidenceError` if no bundle was measured."""
    if not any(m.ours and m.samples for m in run.systems):
        raise EvidenceError(
            "none of our bundles was measured", expected="at least one", remedy="; ".join(run.failures.values())
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(run.model_dump_json(indent=1) + "\n")
    if run.documents:
        (folder / f"{stem}.svg").write_text(standalone(plot(run)))
    (folder / f"{stem}.md").write_text(page(run, stem))


def workloads(run: Run) -> list[Workload]:
    """Every workload that any system was timed on, decode first, by size."""
    return sorted({Workload(s.phase, s.size) for m in run.systems for s in m.samples})


def page(run: Run, stem: str) -> str:
    decodes = [workload for workload in workloads(run) if workload.phase == "decode"]
    sections = [
        "# Against other engines on this processor",
        "This page is written by `make bench-peers`; do not edit it. "
        f"[{stem}.json]({stem}.json) has the raw figures of every round.",
        _conditions(run),
        *([run.note] if run.note else []),
        "## Speed, quality and memory",
        _table(run),
        _legend(),
        *(["## Distinct experts", _experts(run)] if any(m.experts for m in run.systems) else []),
        *([f"![Speed against KL, one panel for each batch size]({stem}.svg)"] if run.documents else []),
        "## Bars",
        "The rivals of a bundle are the peers in its class. A ratio is the median of the ratios of the single rounds. "
        "The table names the rival with the smallest ratio.",
        _bars(bars(run.systems, run.kind)),
        *(["## Domination", "\n".join(_domination(run, workload) for workload in decodes)] if run.documents else []),
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
        f"{run.model} on {run.machine}: {run.threads} threads for each engine. Decode is greedy, with prompts of "
        f"{run.prompt_tokens} tokens and {run.new_tokens} generated tokens. There are {run.rounds} rounds. In each "
        "round all engines take turns, and only one runs at a time. "
        "Figures are medians over rounds. "
        + (
            f"KL and top-token agreement are against our float bundle on the same {run.documents} held-out passages."
            if run.documents
            else "Random weights say nothing of quality, so no KL is shown, and classes follow from bits per weight."
        )
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
        f"Prefill: one prompt, until its first token is chosen; the median of {PREFILLS} prompts in each round.",
        "Roofline: bytes that a step at B=1 reads of weights (of experts those that it chooses) and moves of recurrent "
        "state per second, as a share of what a plain loop reads. The "
        f"median of {TURNS} turns of steps and reads, since the bandwidth of a virtual machine changes within seconds.",
        "Peak MB: peak memory of the whole process over all timed work, libraries and interpreter included.",
        "ik_llama.cpp gives no logits, so its class follows from its bits per weight.",
        "Logits: OpenVINO's come from its runtime on the same model file with the same properties, because its "
        "continuous batching gives no logits of a prompt. All others come from the timed engine itself.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _table(run: Run) -> str:
    columns = workloads(run)
    head = ["engine", "class", "KL", "top token", *(str(w) for w in columns), "roofline", "peak MB", "weights MB"]
    lines = [
        [
            f"**{m.name}**" if m.ours else m.name,
            " and ".join(classes(m)) or ("unclassed" if m.unclassed else "none"),
            "-" if m.kl is None else f"{m.kl:.4f}",
            "-" if m.top_token is None else f"{m.top_token:.1%}",
            *(_number(m.speed(w)) for w in columns),
            f"{m.turns.share:.0%}" if m.turns else "-",
            f"{m.peak_bytes / 1e6:,.0f}" if m.peak_bytes else "-",
            f"{m.file_bytes / 1e6:,.0f}",
        ]
        for m in sorted(run.systems, key=lambda m: not m.ours)
    ]
    return "Speeds are in tokens per second.\n\n" + _markdown(head, lines)


def _experts(run: Run) -> str:
    """What a step reads of a mixture grows with the experts that its streams do not share."""
    batches = sorted({batch for m in run.systems for batch in m.experts})
    rows = [[m.name, *(_number(m.experts.get(batch)) for batch in batches)] for m in run.systems]
    return (
        "How many different experts of a layer a decode step chooses: the mean over steps and layers, by the router of "
        "the float model, for the tokens that each engine decoded. An engine that does not tell its tokens has none: "
        "ik_llama.cpp decodes random ones.\n\n" + _markdown(["engine", *(f"B={batch}" for batch in batches)], rows)
    )


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
    return draw(
        alt.vconcat(*(_panel(workload, systems) for workload in panels), autosize="pad"),
        "Speed against KL from the float model",
        "; ".join(_domination(run, workload).removeprefix("- ") for workload in panels),
    )


def _panel(workload: Workload, systems: Sequence[Measured]) -> alt.LayerChart | alt.FacetChart:
    points = [(m, speed) for m in systems if (speed := m.speed(workload)) is not None]
    top = 1.1 * max((speed for _, speed in points), default=1.0)
    values: list[tuple[Any, ...]] = []
    name_y = math.inf
    for m, speed in sorted(points, key=lambda point: -point[1]):
        # The names are a column beside the panel, fastest first. A name that would overlap the last one moves down.
        name_y = min(speed, name_y - top * LINE / PANEL_HEIGHT)
        tip = f"{m.name}: {speed:,.0f} tokens/s, KL {m.kl:.2g}"
        values.append((m.name, max(m.kl or 0.0, KL_FLOOR), speed, name_y, KINDS[m.ours], tip))
    base = alt.Chart(
        rows("name kl speed name_y kind tip", values),
        title=f"{workload}: tokens/s",
        width=PANEL_WIDTH,
        height=PANEL_HEIGHT,
    )
    x = alt.X("kl:Q", title="KL, nats per token; lower is better").scale(type="log").axis(format="~e")
    y = alt.Y("speed:Q", title=None).scale(domain=[0, top], nice=False)
    colors = alt.Scale(domain=[KINDS[True], KINDS[False]], range=[CANDIDATE, BASELINE])
    return alt.layer(
        rule(NEAR_LOSSLESS_KL, FAIL, strokeDash=[5, 4]),
        base.mark_rule(color=RULE, strokeWidth=1).encode(x, y, x2=alt.value(PANEL_WIDTH + 4), y2="name_y"),
        base.mark_point(size=70).encode(x, y, alt.Color("kind:N", scale=colors), description="tip:N"),
        base.mark_text(align="left").encode(alt.Y("name_y:Q"), x=alt.value(PANEL_WIDTH + 8), text="name:N"),
    )
