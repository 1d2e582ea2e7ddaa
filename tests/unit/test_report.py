"""The report page and its charts."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.block import Bars, Divergence, Interval, Intervals, Roofline
from evals.check import Check, Outcome
from pipeline.report import charts, vega
from pipeline.report.data import LayerRow, ReportData, flat_metrics
from pipeline.report.write import render as render_with
from pipeline.report.write import write
from tapeout.errors import EvidenceError
from tests.report_example import example_report, example_verdict, without_evidence

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Balanced(HTMLParser):
    """Collects text and external references; fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    """The charts of the example by name."""
    return charts.charts(example_report())


def render(data: ReportData) -> str:
    return render_with(data, charts.charts(data))


def parse(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_page_is_whole_self_contained_and_says_the_verdict(outcome: Outcome, drawn: dict[str, str]) -> None:
    verdict = example_verdict(outcome)
    data = example_report(verdict)
    page = render(data) if outcome is Outcome.FAIL else render_with(data, drawn)
    parsed = parse(page)
    assert f'<span class="badge">{outcome.value}</span>' in page
    assert "script" not in parsed.tags and all(link.startswith("#a-") for link in parsed.references)
    assert "url(" not in page and "@import" not in page
    text = " ".join(parsed.text)
    for check in verdict.checks:
        assert check.title in text and check.reason in text
    for part in verdict.slices:
        assert part.task in text
    assert "CachedAttention" in text and "layers.11.down" in text and "gate.max_kl" in text


def test_notes_of_the_quantize_stage_are_said() -> None:
    page = Balanced()
    page.feed(render(replace(example_report(), notes=("2 of 8 experts <3, 5> were hardly seen",))))
    assert "2 of 8 experts <3, 5> were hardly seen" in page.text


def test_the_same_evidence_gives_the_same_bytes() -> None:
    assert render(example_report()) == render(example_report())


def test_absent_evidence_is_said_not_drawn() -> None:
    page = render(without_evidence())
    parse(page)
    for phrase in (
        "No accuracy evidence",
        "No held-out text",
        "No traffic",
        "No benchmark",
        "No quantization plan",
        "No precision plan",
        "No precision plan",
    ):
        assert phrase in page
    assert "<svg" not in page and "nothing was replayed" in page


def test_hostile_text_is_escaped() -> None:
    check = Check(name="x", title="<script>alert(1)</script>", outcome=Outcome.FAIL, reason="a & b <i>")
    verdict = example_verdict(Outcome.FAIL, checks=(check,))
    data = replace(example_report(verdict), model_name='"><img src=x>', recipe={"<b>": "</table>"})
    page = render(data)
    assert "script" not in parse(page).tags and "<img" not in page


def test_hostile_text_is_escaped_in_charts() -> None:
    label = "\"><script>alert(1)</script>&'\\"
    row = Interval(label, 0.01, -0.01, 0.02, 5)
    for chart in (
        charts.intervals(Intervals(label, (row,), 0.02, 0.95)),
        charts.bars(Bars(label, label, ((label, 1.0, 2.0),), True, label)),
        charts.bits_by_layer([LayerRow(label, 0, label, label, 8, 8.25, 0.1, 0.1)]),
    ):
        root = ElementTree.fromstring(chart)
        assert not [node for node in root.iter() if "script" in node.tag]
        assert any(label in (node.text or "") for node in root.iter())


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome.PASS, "All 3 checks hold at 95 % confidence."),
        (Outcome.FAIL, "1 of 3 checks failed: Mean KL, the upper bound 0.3795 is not below 0.03"),
        (Outcome.INCONCLUSIVE, "1 of 3 checks could not be decided: Mean KL, "),
    ],
)
def test_the_headline_gives_the_reason(outcome: Outcome, words: str) -> None:
    assert example_verdict(outcome).headline.startswith(words)


def test_a_confidence_is_not_rounded_up() -> None:
    bounds = {**example_verdict().bounds, "confidence": 0.999}
    verdict = example_verdict(bounds=bounds)
    assert verdict.headline == "All 3 checks hold at 99.9 % confidence."
    page = render(example_report(verdict))
    assert "one-sided at 99.9 %" in page and "99.9 % confidence each" in page and "at 100%" not in page


def test_tokens_are_shown_with_the_clusters_their_bounds_rest_on(drawn: dict[str, str]) -> None:
    text = " ".join(" ".join(parse(render_with(example_report(), drawn)).text).split())
    assert "16,384 tokens in 64 clusters" in text and "2,500 items the lower bound" in text


def test_the_headline_of_no_checks_is_no_pass() -> None:
    assert "never passes" in example_verdict(Outcome.INCONCLUSIVE, checks=()).headline


def test_every_chart_has_a_result_for_screen_readers_and_stands_alone(drawn: dict[str, str]) -> None:
    assert set(drawn) >= {
        "accuracy",
        "kl",
        "bits",
        "throughput",
        "latency",
        "memory",
        "roofline",
        "frontier",
        "layer-error-o",
    }
    for chart in drawn.values():
        root = ElementTree.fromstring(chart)
        assert root.get("role") == "img" and re.search(r"\d", root.get("aria-label") or "")
        alone = ElementTree.fromstring(vega.standalone(chart))
        assert any(node.tag.endswith("style") for node in alone)
    assert "pooled: -0.32 points" in drawn["accuracy"] and "the margin is -2.00" in drawn["accuracy"]
    assert "17.9 GB/s, 46%" in drawn["roofline"]


def test_every_colour_is_one_that_both_colour_schemes_define(drawn: dict[str, str]) -> None:
    """A colour that vl-convert or we write as a number does not change with the scheme of the reader."""
    _, _, dark = vega.STYLE.partition("dark")
    for name, chart in drawn.items():
        for chart_colour in re.findall(r'(?:fill|stroke)="([^"]*)"', chart):
            found = re.fullmatch(r"var\(--([\w-]+)\)", chart_colour)
            known = chart_colour in ("none", "transparent") or (found and f"--{found[1]}:" in dark)
            assert known, f"{name}: {chart_colour}"


SVG = "{http://www.w3.org/2000/svg}"
CHARACTER = 6.2  # units a letter of the 12 px text is wide, on average


def assert_text_fits(chart: str) -> None:
    def check(node: ElementTree.Element, left: float) -> None:
        moved = re.match(r"translate\((-?[\d.]+)", node.get("transform", ""))
        x = left + (float(moved[1]) if moved else 0)
        if node.tag == f"{SVG}text":
            width = CHARACTER * len(node.text or "")
            start = x - {"start": 0, "middle": width / 2, "end": width}[node.get("text-anchor", "start")]
            assert start >= -1 and start + width <= vega.WIDTH + 1, f"{node.text!r} from {start} to {start + width}"
        for inner in node:
            check(inner, x)

    root = ElementTree.fromstring(chart)
    assert (root.get("viewBox") or "").startswith(f"0 0 {vega.WIDTH} ")
    check(root, 0)


def test_no_text_is_cut_off(drawn: dict[str, str]) -> None:
    for chart in drawn.values():
        assert_text_fits(chart)


@settings(max_examples=20)
@given(st.floats(1, 2000), st.floats(0.01, 1.2), st.floats(0.01, 1.2))
def test_a_roofline_of_any_proportions_is_readable(bandwidth: float, baseline: float, candidate: float) -> None:
    chart = charts.roofline(Roofline(bandwidth, bandwidth * baseline, bandwidth * candidate))
    assert_text_fits(chart)
    assert f"measured {bandwidth:.1f} GB/s" in chart


def test_an_error_chart_counts_linears_and_layers_and_names_each_dot() -> None:
    rows = [
        LayerRow(f"layers.{layer}.{name}", layer, "qkv", "int8", 8, 8.25, 0.01 * (layer + 1), 0.005)
        for layer in range(3)
        for name in ("q", "k", "v")
    ]
    chart = charts.layer_error(rows, "qkv")
    assert "9 linears in 3 layers" in chart
    assert all(chart.count(f"<title>{row.group} int8: {row.error_before:.3g} before") == 2 for row in rows)


def test_a_model_of_one_layer_has_charts() -> None:
    rows = [LayerRow("layers.0.qkv", 0, "qkv", "int8", 8, 8.25, 0.0, 0.0)]
    assert "1 linears in 1 layers" in charts.layer_error(rows, "qkv") and "8 bits" in charts.bits_by_layer(rows)


def bar_heights(chart: str) -> dict[str, float]:
    """Of the bars that have tooltips, by tooltip."""
    found = re.findall(r'<path d="M[\d.-]+,[\d.-]+h[\d.]+v([\d.]+)[^>]*><title>([^<]*)</title>', chart)
    return {tip: float(height) for height, tip in found}


def test_bars_are_as_long_as_their_values() -> None:
    heights = bar_heights(charts.bars(Bars("Throughput", "tokens/s", (("1", 100.0, 300.0),), True)))
    assert heights.keys() == {"1 baseline: 100 tokens/s", "1 candidate: 300 tokens/s"}
    assert heights["1 candidate: 300 tokens/s"] == pytest.approx(3 * heights["1 baseline: 100 tokens/s"], rel=0.01)


@settings(max_examples=25)
@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=80),
    st.floats(1e-4, 5),
    st.integers(1, 40),
)
def test_every_document_is_counted_once(documents: list[float], bound: float, bins: int) -> None:
    mean = sum(documents) / len(documents)
    chart = charts.kl_distribution(Divergence(tuple(documents), mean, mean, bound), bins)
    counts = [int(text) for text in re.findall(r"<title>(\d+) documents", chart)]
    assert sum(counts) == len(documents) and len(counts) == bins
    assert_text_fits(chart)


def test_numbers_that_are_not_finite_are_refused_or_said() -> None:
    with pytest.raises(EvidenceError, match=r"Throughput holds nan"):
        charts.bars(Bars("Throughput", "tokens/s", (("1", math.nan, 1.0),), True))
    chart = charts.kl_distribution(Divergence((0.01, math.inf), 0.01, 0.02, 0.03))
    assert "1 documents without a finite KL are not drawn" in chart


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(EvidenceError, match="'conv'"):
        charts.layer_error(example_report().layers, "conv")


def test_the_written_folder_holds_page_plots_tables_and_metrics(tmp_path: Path, drawn: dict[str, str]) -> None:
    data = example_report()
    (tmp_path / "report" / "plots").mkdir(parents=True)
    (tmp_path / "report" / "plots" / "stale.svg").write_text("")
    page = write(data, tmp_path / "report")
    assert page.read_text() == render_with(data, drawn)
    files = {path.name for path in (page.parent / "plots").iterdir()}
    assert files == {f"{name}.svg" for name in drawn} | {
        *("kl.csv", "frontier.csv", "layers.csv", "throughput.csv"),
    }
    with (page.parent / "plots" / "kl.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 64 and float(rows[-1]["share_of_documents"]) == 1.0
    with (page.parent / "plots" / "throughput.csv").open() as stream:
        assert [r["engine"] for r in csv.DictReader(stream)] == ["baseline", "candidate"] * 3


def test_metrics_are_finite_and_absence_is_absence() -> None:
    metrics = flat_metrics(example_report())
    assert metrics["verdict.kl"] == 0.0185 and metrics["roofline.candidate_share"] == pytest.approx(17.9 / 38.7)
    assert metrics["weights.bits_per_weight"] == 6.21 and "weights.size_mb" not in metrics
    starved = flat_metrics(without_evidence())
    assert all(math.isfinite(value) for value in starved.values()) and "kl.mean" not in starved
