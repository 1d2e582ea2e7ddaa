"""Objectives of a service: what counts as an event, what is left of the budget, and when the shipped rules fire."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.registry import CollectorRegistry

from pipeline.cli import gateway as gateway_command
from pipeline.cli.serve_options import HttpOptions
from runtime.gateway.fleet.discovery import FleetFileError, FromFile
from runtime.gateway.operations import objectives
from runtime.gateway.operations.objectives import ObjectiveEvents
from runtime.gateway.operations.operations import Operations, OperationsSettings
from runtime.gateway.protocol.calls import Call, Caller
from runtime.gateway.protocol.errors import ApiError
from tapeout.slo import LatencyObjective, ServiceLevelObjectives, SloError, read_objectives
from tests.serving_client import LocalClient, run_call

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "slo.yaml"
SLO = ServiceLevelObjectives(
    availability=0.9,
    ttft=LatencyObjective(seconds=0.5, share=0.5),
    itl=LatencyObjective(seconds=0.1, share=0.75),
)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def call(**values: Any) -> Call:
    made = Call("c", "r", "/v1/completions", "m", "d", Caller(), False, [[1]], 1, 5, arrival=100.0)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def counted(slo: ServiceLevelObjectives, *calls: Call) -> dict[str, tuple[int, int]]:
    """Bad and all events by objective."""
    events = ObjectiveEvents(slo, Clock())
    for one in calls:
        events.admit(one)
        events.ended(one)
    return {budget["objective"]: (budget["bad"], budget["total"]) for budget in events.budgets()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (0, 1)),
        ({"error": ApiError(500, "x")}, (1, 1)),
        ({"error": ApiError(503, "x", code="engine_down")}, (1, 1)),
        ({"error": ApiError(408, "x", code="timeout")}, (1, 1)),
        ({"error": ApiError(429, "x", code="queue_full")}, (1, 1)),
        ({"error": ApiError(429, "x", code="rate_limit_exceeded")}, (0, 0)),
        ({"error": ApiError(400, "x")}, (0, 0)),
        ({"cancelled": True}, (0, 0)),
    ],
)
def test_only_faults_of_the_service_spend_the_budget_of_availability(
    values: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert counted(SLO, call(**values))["availability"] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"first_token": 100.5, "end": 101.0}, (0, 1)),
        ({"first_token": 100.51, "end": 101.0}, (1, 1)),
        ({"cancelled": True, "end": 100.6}, (1, 1)),
        ({"cancelled": True, "end": 100.4}, (0, 0)),
        ({"error": ApiError(500, "x"), "end": 109.0}, (0, 0)),
    ],
)
def test_a_late_first_token_is_bad_also_if_nobody_waited_for_it(
    values: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert counted(SLO, call(**values))["ttft"] == expected


def test_gaps_are_those_of_each_choice() -> None:
    events, one = ObjectiveEvents(SLO, Clock()), call(n=2)
    events.admit(one)
    for choice, now in ((0, 1.0), (1, 1.15), (0, 1.05), (1, 1.3), (0, 1.1)):
        events.tokens(one, choice, 1, now)
    events.ended(one)
    found = {budget["objective"]: budget for budget in events.budgets()}["itl"]
    assert (found["bad"], found["total"]) == (1, 3)
    assert found["left"] == pytest.approx(1 - (1 / 3) / 0.25)


def test_events_leave_the_budget_after_the_window() -> None:
    clock = Clock()
    events = ObjectiveEvents(ServiceLevelObjectives(availability=0.5), clock)
    events.ended(call(error=ApiError(500, "x")))
    assert events.budgets()[0]["left"] == -1
    clock.now = objectives.WINDOW_DAYS * 86400 - 1
    events.ended(call())
    assert events.budgets()[0]["left"] == 0
    clock.now += 1
    assert (events.budgets()[0]["bad"], events.budgets()[0]["left"]) == (0, 1)
    samples = [sample for metric in events.collect() for sample in metric.samples]
    assert {sample.name: sample.value for sample in samples}["tapeout:slo_events_total"] == 2, "counters never fall"


def test_a_server_counts_what_its_engine_answers() -> None:
    client = LocalClient()
    operations = Operations(client, "m", OperationsSettings(slo=SLO))
    asyncio.run(run_call(client, operations.extensions.hooks, new=4))
    text = operations.metrics.text().decode()
    assert 'tapeout:slo_events_total{slo="availability"} 1.0' in text
    assert 'tapeout:slo_events_total{slo="itl"} 3.0' in text
    assert 'tapeout:slo_objective{slo="ttft"} 0.5' in text
    without = Operations(LocalClient(), "m", OperationsSettings())
    assert "tapeout:slo_" not in without.metrics.text().decode()


# --- files ---------------------------------------------------------------------------------------------------------


def test_the_section_is_read_from_a_file_that_has_others(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("engines: ['unix:/x']\nslo: {availability: 0.999, itl: {seconds: 0.05}}\n")
    found = read_objectives(path)
    assert found.shares == {"availability": 0.999, "itl": 0.99} and found.ttft is None
    assert FromFile(path).read().engines == ("unix:/x",)


@pytest.mark.parametrize(
    "section",
    [
        "slo: {}",
        "slo:",
        "slo: {availability: 1}",
        "slo: {availability: 99.9}",
        "slo: {ttft: {seconds: 0}}",
        "slo: {ttft: {seconds: .inf}}",
        "slo: {latency: 1}",
        "slo: [",
    ],
)
def test_what_is_no_objective_is_one_clear_error(tmp_path: Path, section: str) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(f"engines: ['unix:/x']\n{section}\n")
    with pytest.raises(SloError, match="expected"):
        read_objectives(path)
    if section != "slo:":  # which is a fleet without objectives
        with pytest.raises(FleetFileError):
            FromFile(path).read()


@pytest.mark.parametrize(("section", "own"), [("", False), ("slo: {availability: 0.5}\n", True)])
def test_a_gateway_finds_the_section_in_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, own: bool
) -> None:
    path, given = tmp_path / "fleet.yaml", list[HttpOptions]()
    path.write_text(f"engines: ['unix:/x']\n{section}")
    monkeypatch.setattr(gateway_command, "answer", lambda listener, options, *_, **__: given.append(options))
    monkeypatch.setattr(gateway_command, "listen", lambda *_: SimpleNamespace())
    monkeypatch.setattr(gateway_command, "FleetClient", lambda *_, **__: SimpleNamespace())
    other = tmp_path / "other.yaml"
    gateway_command.run(path, 1.0, HttpOptions())
    gateway_command.run(path, 1.0, HttpOptions(slo=other))
    assert [options.slo for options in given] == [path if own else None, other]


# --- the rules, in Prometheus's own evaluation -----------------------------------------------------------------------

promtool = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(promtool is None, reason="no promtool; Debian's package is `prometheus`")


@needs_promtool
def test_promtool_accepts_the_rules_and_the_settings(tmp_path: Path) -> None:
    for words in (["rules", "slo.yaml"], ["rules", "alerts.yaml"], ["config", "prometheus.yaml"]):
        found = subprocess.run([promtool or "", "check", *words], cwd=RULES.parent, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


def fired(folder: Path, bad: str, at: str) -> set[str]:
    """Which alerts fire, of 100 events a minute for three days of which so many are bad. ``bad``: see promtool."""
    series = [
        ("tapeout:slo_objective{slo='ttft'}", "0.99x4320"),
        ("tapeout:slo_events_total{slo='ttft'}", "0+100x4320"),
        ("tapeout:slo_good_events_total{slo='ttft'}", bad),
    ]
    names = ("ErrorBudgetBurnsFast", "ErrorBudgetBurns")
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "5m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": one, "values": values} for one, values in series],
                "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in names],
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    found = subprocess.run([promtool or "", "test", "rules", str(path)], capture_output=True, text=True)
    results = set(re.findall(r"alertname: ?(\w+)", found.stdout + found.stderr))
    assert bool(results) == bool(found.returncode) and results <= {*names}, found.stdout + found.stderr
    return results


@needs_promtool
@pytest.mark.parametrize(
    ("good", "at", "expected"),
    [
        # Of 100 events a minute one may be bad.
        ("0+100x4320", "71h", set[str]()),
        ("0+99x4320", "71h", set[str]()),
        # Planted burns: 20 % bad in the last hour; it has ended 10 minutes ago; twice the rate for days.
        ("0+100x4200 420080+80x120", "71h10m", {"ErrorBudgetBurnsFast"}),
        ("0+100x4100 410080+80x60 414900+100x160", "69h35m", set[str]()),
        ("0+98x4320", "71h", {"ErrorBudgetBurns"}),
        ("0+92x4320", "71h", {"ErrorBudgetBurns", "ErrorBudgetBurnsFast"}),
    ],
)
def test_a_planted_burn_fires_the_alerts_of_its_speed(tmp_path: Path, good: str, at: str, expected: set[str]) -> None:
    assert fired(tmp_path, good, at) == expected


def test_the_registry_takes_the_counters() -> None:
    registry = CollectorRegistry()
    registry.register(ObjectiveEvents(SLO))
    assert registry.get_sample_value("tapeout:slo_budget_left", {"slo": "ttft"}) == 1
