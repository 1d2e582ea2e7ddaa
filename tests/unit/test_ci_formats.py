"""What CI systems read of a verdict: each format is parsed as its reader does, whatever texts the verdict holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from evals.check import Check, Outcome, combine
from evals.ci import document, github, write
from evals.ci.comment import COMMENT_BYTES, MARKER, changed, comment
from evals.ci.gitlab import code_quality, metrics
from evals.ci.junit import junit
from evals.ci.markdown import SUMMARY_BYTES, escape, summary
from evals.ci.result import ChampionReference, CiError, GateResult
from evals.ci.sarif import sarif
from evals.ci.write import FORMATS, GITHUB, SYSTEMS, chosen, verdict_json
from evals.verdict import COLUMNS, Verdict
from tapeout.signing import Resource, Statement, SubjectDigest, TestResult
from tests.report_example import example_verdict

STATEMENT = Statement(
    subject=(Resource(name="record.json", digest=SubjectDigest(sha256="0" * 64)),),
    predicate=TestResult(
        result="FAILED",
        configuration=(),
        passedTests=("executed",),
        failedTests=("kl",),
        outcome="FAIL",
        executed_on="cpu",
        model="tiny",
        bundle="1" * 64,
        verdict="2" * 64,
        evidence={},
    ),
)
NASTY = [
    "a|b", "x\n::error::owned", "<script>alert(1)</script>", "]]>", "`code", "**bold**", "[a](http://x.example)",
    "@team", "#12", "www.x.example", "https://x.example", "50 %\r\n", 'say "yes"', "back\\slash", "\x00\x1b[31m",
    "\u2028", "<!-- ", "&lt;", "| --- |", "::stop-commands::x", "\ufffe", "~~no~~", "$x$",
]  # fmt: skip
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(NASTY), min_size=1, max_size=3).map(" ".join))
OUTCOMES = st.sampled_from(list(Outcome))
NUMBERS = st.none() | st.floats(-1e6, 1e6)
LENIENT = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def results(draw: Callable[..., Any]) -> GateResult:
    count = draw(st.integers(0, 14))
    checks = tuple(
        Check(
            name=f"check{i}" if draw(st.booleans()) else f"check{i}{draw(TEXTS)}",
            title=draw(TEXTS),
            outcome=draw(OUTCOMES),
            reason=draw(TEXTS),
            direction=draw(st.sampled_from(["at_least", "at_most"])),
            value=draw(NUMBERS),
            bound=draw(NUMBERS),
            lower=draw(NUMBERS),
            upper=draw(NUMBERS),
        )
        for i in range(count)
    )
    return result_of(*checks, model=draw(TEXTS))


def result_of(*checks: Check, model: str = "tiny", champion: ChampionReference | None = None) -> GateResult:
    verdict = example_verdict(checks=checks).model_copy(update={"outcome": combine(c.outcome for c in checks)})
    return GateResult(model, verdict, "d" * 64, STATEMENT, "params.yaml", 73, champion)


def check(name: str, outcome: Outcome = Outcome.FAIL, **changes: Any) -> Check:
    fields: dict[str, Any] = {"title": name.title(), "reason": f"{name} is bad", "direction": "at_most"}
    return Check(name=name, outcome=outcome, **fields | changes)


def rows(markdown: str) -> list[list[str]]:
    """Texts of the cells of the first table, as a reader sees them; fails on markup that the table did not intend."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    found: list[list[str]] = []
    for before, token in pairwise(tokens):
        if before.type == "tr_open":
            found.append([])
        if before.type in ("td_open", "th_open"):
            children = token.children or []
            assert {child.type for child in children} <= {"text", "text_special", "html_inline"}
            assert all(child.content == "<!-- -->" for child in children if child.type == "html_inline")
            found[-1].append("".join(child.content for child in children if child.type != "html_inline"))
    return found


@LENIENT
@given(results())
def test_the_summary_has_a_row_of_plain_text_for_every_check(result: GateResult) -> None:
    header, *found = rows(summary(result))
    assert tuple(header) == COLUMNS
    assert [len(row) for row in found] == [len(COLUMNS)] * len(result.verdict.checks)
    shown = sorted(row[0].split()[-1] for row in found)
    assert shown == sorted(check.outcome.value for check in result.verdict.checks)


@pytest.mark.parametrize("text", NASTY)
def test_text_shows_as_itself(text: str) -> None:
    (_, (shown,)) = rows(f"| a |\n| --- |\n| {escape(text)} |\n")
    plain = " ".join(
        "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text).split()
    )
    assert shown == plain


def test_text_that_is_not_escaped_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        rows("| a |\n| --- |\n| **bold** |\n")
    assert rows("| a | b |\n| --- | --- |\n| a|b | c |\n")[1] == ["a", "b"]


@pytest.mark.parametrize("text", ["@team", "see #12", "mail a@b.example", "www.x.example", "https://x.example", "!7"])
def test_nothing_that_github_would_link_is_left(text: str) -> None:
    for character in ("@", "#", "!"):
        assert character not in escape(text).replace("<!-- -->", "").replace("&#", "")
    assert "www." not in escape(text) and "://" not in escape(text)


@LENIENT
@given(results(), st.integers(1500, 4000))
def test_the_summary_keeps_its_limit_and_counts_what_it_leaves_out(result: GateResult, limit: int) -> None:
    text = summary(result, limit)
    shown = len(rows(text)) - 1
    assert shown == 0 or len(text.encode()) <= limit
    left_out = len(result.verdict.checks) - shown
    assert (f"… and {left_out} more checks" in text) == (left_out > 0)


def test_a_summary_of_ten_thousand_checks_is_below_one_mebibyte() -> None:
    result = result_of(*(check(f"c{i}", reason="é" * 400) for i in range(10_000)))
    text = summary(result)
    assert SUMMARY_BYTES - 2000 < len(text.encode()) <= SUMMARY_BYTES
    assert "more checks: see `verdict.json`" in text
    assert len(comment(result).encode()) <= COMMENT_BYTES


@LENIENT
@given(results())
def test_annotations_are_one_line_each_and_at_most_ten_of_a_kind(result: GateResult) -> None:
    lines = list(github.annotation_lines(result))
    kinds = [parsed(line)[0] for line in lines]
    counts = {outcome: sum(c.outcome is outcome for c in result.verdict.checks) for outcome in Outcome}
    assert kinds.count("error") == min(10, counts[Outcome.FAIL])
    assert kinds.count("warning") == min(10, counts[Outcome.INCONCLUSIVE])
    assert kinds.count("notice") == (counts[Outcome.FAIL] + counts[Outcome.INCONCLUSIVE] == 0)


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """As the runner does: it splits at line ends, at the first `::` after the properties, at commas and `=`."""
    assert line.splitlines() == [line]
    assert line.startswith("::")
    head, separator, message = line[2:].partition("::")
    kind, _, properties = head.partition(" ")
    assert separator and kind in ("error", "warning", "notice")
    named = dict(entry.split("=", 1) for entry in properties.split(",") if entry)
    assert set(named) <= {"file", "line", "title"}

    def unescape(text: str) -> str:
        for written, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            text = text.replace(written, character)
        return text

    return kind, {name: unescape(value) for name, value in named.items()}, unescape(message)


def test_the_worst_check_comes_first() -> None:
    result = result_of(
        check("little", value=0.031, bound=0.03),
        check("undecided", Outcome.INCONCLUSIVE, value=0.0, bound=0.03),
        check("fine", Outcome.PASS, value=0.0, bound=0.03),
        check("much", value=0.3, bound=0.03),
        check("slow", value=0.5, bound=1.0, direction="at_least"),
    )
    assert [c.name for c in result.worst_first] == ["much", "slow", "little", "undecided", "fine"]
    first = parsed(next(iter(github.annotation_lines(result))))
    assert first == ("error", {"file": "params.yaml", "line": "73", "title": "gate: Much"}, "much is bad")


@LENIENT
@given(results())
def test_junit_is_valid_xml_that_counts_and_names_every_check(result: GateResult) -> None:
    root = ElementTree.fromstring(junit(result).encode("utf-8"))
    suite = root[0]
    cases = suite.findall("testcase")
    assert root.tag == "testsuites" and len(cases) == len(result.verdict.checks) == int(suite.get("tests", ""))
    for kind, outcome in (("failure", Outcome.FAIL), ("error", Outcome.INCONCLUSIVE)):
        expected = [c.name for c in result.verdict.checks if c.outcome is outcome]
        assert len([case for case in cases if case.find(kind) is not None]) == len(expected)
        assert int(suite.get(f"{kind}s", "")) == int(root.get(f"{kind}s", "")) == len(expected)
    assert not [case for case in cases if case.find("skipped") is not None]


@LENIENT
@given(results())
def test_metrics_are_openmetrics(result: GateResult) -> None:
    text = metrics(result)
    assert text.endswith("# EOF\n")
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    found = {sample.labels["name"]: sample.value for sample in families["tapeout_check"]}
    assert found == {c.name: c.value for c in result.verdict.checks if c.value is not None}
    assert families["tapeout_gate_exit_code"][0].value == result.verdict.exit_code
    codes = [sample.value for sample in families["tapeout_check_exit_code"]]
    assert codes == [{"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[c.outcome] for c in result.verdict.checks]


@LENIENT
@given(results())
def test_issues_are_of_checks_that_did_not_pass_and_keep_their_fingerprints(result: GateResult) -> None:
    issues = json.loads(code_quality(result))
    expected = [c for c in result.worst_first if c.outcome is not Outcome.PASS]
    assert [issue["check_name"] for issue in issues] == [c.name for c in expected]
    assert len({issue["fingerprint"] for issue in issues}) == len({c.name for c in expected})
    worse = result_of(*(c.model_copy(update={"reason": "other", "value": 1.0}) for c in result.verdict.checks))
    again = json.loads(code_quality(worse))
    assert {issue["fingerprint"] for issue in again} == {issue["fingerprint"] for issue in issues}
    scanned = json.loads(sarif(result))["runs"][0]
    assert [entry["ruleId"] for entry in scanned["results"]] == [c.name for c in expected]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_verdict_json_has_the_published_schema(outcome: Outcome) -> None:
    schema = json.loads(document.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    verdict = example_verdict(outcome)
    found = json.loads(verdict_json(GateResult("tiny", verdict, "d" * 64, STATEMENT, "params.yaml", 1)))
    jsonschema.validate(found, schema)
    assert (found["outcome"], found["exit_code"]) == (outcome.value, verdict.exit_code)
    for broken in ({**found, "outcome": "MAYBE"}, {k: v for k, v in found.items() if k != "checks"}, {**found, "x": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_the_published_schema_is_that_of_the_code() -> None:
    assert document.SCHEMA_FILE.read_text() == document.schema_text(), "run `python -m evals.ci.document`"


@pytest.mark.parametrize("variable", SYSTEMS)
def test_the_system_is_known_by_its_variable(variable: str) -> None:
    assert chosen((), {variable: "true"}) == SYSTEMS[variable]
    assert chosen((), {variable: ""}) == ()
    assert chosen(("junit", "junit"), {variable: "true"}) == ("junit",)
    assert chosen(("none",), {variable: "true"}) == ()


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(CiError, match="no format 'xml'") as error:
        chosen(("junit", "xml"), {})
    assert "junit" in error.value.expected


def test_every_format_is_written_and_github_gets_its_files(tmp_path: Path) -> None:
    result = result_of(check("kl"))
    step, output = tmp_path / "step.md", tmp_path / "output"
    step.write_text("what an earlier command wrote\n")
    environment = {"GITHUB_STEP_SUMMARY": str(step), "GITHUB_OUTPUT": str(output)}
    written = write.write(result, (GITHUB, *FORMATS), tmp_path / "ci", environment)
    assert sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "ci").iterdir())
    assert len(written) == len(FORMATS) and all(path.stat().st_size for path in written)
    assert step.read_text() == "what an earlier command wrote\n" + summary(result)
    assert output.read_text().splitlines() == ["outcome=FAIL", "exit-code=1", f"digest={result.verdict.candidate}"]
    assert json.loads((tmp_path / "ci/statement.json").read_text())["_type"] == "https://in-toto.io/Statement/v1"


def test_a_summary_that_would_be_too_large_is_left_out(tmp_path: Path) -> None:
    step = tmp_path / "step.md"
    step.write_text("x" * (SUMMARY_BYTES - 100))
    write.write(result_of(check("kl")), (GITHUB,), tmp_path / "ci", {"GITHUB_STEP_SUMMARY": str(step)})
    assert step.stat().st_size == SUMMARY_BYTES - 100


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ci").write_text("a file")
    with pytest.raises(CiError, match="cannot write"):
        write.write(result_of(check("kl")), ("junit",), tmp_path / "ci", {})
    (tmp_path / "out" / "junit.xml").mkdir(parents=True)
    with pytest.raises(CiError, match="cannot write"):
        write.write(result_of(check("kl")), ("junit",), tmp_path / "out", {})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["junit.xml"]


KL = {"value": 0.012, "lower": 0.011, "upper": 0.013}


@pytest.mark.parametrize(
    ("direction", "before", "expected"),
    [
        ("at_most", {"lower": 0.002, "upper": 0.010}, -1),
        ("at_most", {"lower": 0.014, "upper": 0.020}, 1),
        ("at_least", {"lower": 0.002, "upper": 0.010}, 1),
        ("at_least", {"lower": 0.014, "upper": 0.020}, -1),
        ("at_most", {"lower": 0.002, "upper": 0.011}, 0),  # the bounds touch
        ("at_most", {"lower": None, "upper": 0.010}, 0),
        (None, {"lower": 0.002, "upper": 0.010}, 0),
    ],
)
def test_a_change_counts_where_bounds_do_not_overlap(direction: Any, before: dict[str, Any], expected: int) -> None:
    now = check("kl", Outcome.PASS, **KL | {"direction": direction})
    assert changed(now, now.model_copy(update=before)) == expected


def champion(*checks: Check, **changes: Any) -> ChampionReference:
    verdict: Verdict = example_verdict(checks=checks)
    return ChampionReference("the champion, version 3", verdict.model_copy(update={"candidate": "e" * 64, **changes}))


def test_the_comment_says_what_became_better_and_worse() -> None:
    now = [check("kl", Outcome.PASS, **KL), check("speed", Outcome.PASS, direction="at_least", **KL)]
    earlier = [c.model_copy(update={"value": 0.2, "lower": 0.1, "upper": 0.3}) for c in now]
    text = comment(result_of(*now, champion=champion(*earlier)))
    assert text.startswith(MARKER) and "Against the champion, version 3" in text
    worse, better = text.split("**Worse**")[1].split("**Better**")
    assert rows(worse)[1][:3] == ["Speed", "0.2 (0.1 … 0.3)", "0.012 (0.011 … 0.013)"]
    assert rows(better)[1][0] == "Kl"
    assert "Plots" not in text
    same = comment(result_of(*now, champion=champion(*now)))
    assert "No difference in 2 checks is larger than its uncertainty" in same
    assert "No champion of tiny is registered" in comment(result_of(*now))
    itself = champion(*now, candidate=result_of(*now).verdict.candidate)
    assert "there is nothing to compare" in comment(result_of(*now, champion=itself))


def test_the_comment_names_other_policies_and_shows_published_plots() -> None:
    earlier = champion(check("kl", Outcome.PASS, **KL))
    loose = earlier.verdict.model_copy(update={"bounds": {**earlier.verdict.bounds, "max_kl": 9.0}})
    result = result_of(check("kl", Outcome.PASS, **KL), champion=ChampionReference("the champion, version 3", loose))
    assert "judged by other policies: gate.max&#95;kl is 9.0 there" in comment(result)
    shown = replace(result, plots=("https://x.example/a b)/kl.svg",))
    assert "![plot](https://x.example/a%20b%29/kl.svg)" in comment(shown)


@LENIENT
@given(results())
def test_the_comment_is_short_and_its_tables_hold(result: GateResult) -> None:
    text = comment(result)
    assert len(text) <= 65_536
    found = rows(text)
    assert all(len(row) == len(found[0]) for row in found)
