"""Controllers of deployments ask a real server for verdicts of a real registry, as the examples in docs/deploy say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jsonpath_ng
import jsonschema
import pytest
import yaml

from engines.bundle import EngineBundle
from evals.check import Outcome
from evals.ci import document
from pipeline.registry import tracking
from pipeline.registry.register import register
from pipeline.registry.verdicts import registered_verdict
from pipeline.registry.versions import UnknownVersionError
from tapeout.artifact import load
from tests import judged, web
from tests.integration.test_serve import Served, bundles, served
from tests.registries import empty_registry

__all__ = ["bundles"]
DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
VERSIONS = {Outcome.PASS: "1", Outcome.FAIL: "2", Outcome.INCONCLUSIVE: "3"}
EDITED = 4  # no other test asks for it: the server keeps answers by what was asked
KL = {Outcome.PASS: 0.01, Outcome.FAIL: 0.345, Outcome.INCONCLUSIVE: 0.03}
SCHEMA = document.schema()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A registry with one version of each outcome, and one more that fails."""
    folder = tmp_path_factory.mktemp("registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", empty_registry(folder))
        for weights, outcome in [*((outcome.value, outcome) for outcome in VERSIONS), ("edited", Outcome.FAIL)]:
            artifacts = folder / weights
            verdict = judged.write_run(artifacts, weights, evidence=judged.good(KL[outcome]))
            register(judged.recipe(), verdict, load(artifacts / "candidate", EngineBundle), artifacts)
        yield folder


@pytest.fixture(scope="module")
def server(registry: Path, bundles: tuple[Path, Path]) -> Iterator[Served]:
    with served(str(bundles[0]), "--unsafe", "--api-key", KEY) as running:
        yield running


def get(server: Served, name: str, version: str, **options: Any) -> httpx2.Response:
    return web.get(f"{server.url}/verdict/{name}/{version}", timeout=120, **{"headers": HEADERS, **options})


@pytest.mark.parametrize("name_version", [(judged.NAME, "champion"), (judged.NAME, "9"), ("nobody", "1")])
def test_what_is_not_there_is_unknown(registry: Path, name_version: tuple[str, str]) -> None:
    """The server answers 404 to this error, which a look-up of seconds gives it (test_controllers_wait...)."""
    with pytest.raises(UnknownVersionError):
        registered_verdict(*name_version)


def test_a_key_is_needed(server: Served) -> None:
    assert get(server, judged.NAME, "1", headers={}).status_code == 401


def argo(server: Served, name: str, version: str) -> str:
    """What Argo Rollouts does: it substitutes arguments, fetches, reads the path, and compares."""
    template, rollout = yaml.safe_load_all((DEPLOY / "argo-rollouts.yaml").read_text())
    given = {arg["name"] for step in rollout["spec"]["strategy"]["canary"]["steps"] if "analysis" in step
             for arg in step["analysis"]["args"]}  # fmt: skip
    declared = {arg["name"] for arg in template["spec"]["args"]}
    assert given == declared - {"api-key"}, "the rollout gives what the template asks for"
    arguments = {"server": server.url, "model": name, "version": version, "api-key": KEY}

    def filled(text: str) -> str:
        return re.sub(r"\{\{args\.([\w-]+)\}\}", lambda found: arguments[found[1]], text)

    (metric,) = template["spec"]["metrics"]
    told = metric["provider"]["web"]
    headers = {header["key"]: filled(header["value"]) for header in told["headers"]}
    answer = web.get(filled(told["url"]), headers=headers, timeout=told["timeoutSeconds"])
    if not answer.is_success:
        return "Error"
    (match,) = jsonpath_ng.parse(told["jsonPath"].strip("{}")).find(answer.json())
    # Comparisons of strings are the same in Argo's expression language and in Python.
    holds = {name: eval(metric[name], {"__builtins__": {}}, {"result": match.value})
             for name in ("successCondition", "failureCondition")}  # fmt: skip
    if holds["failureCondition"]:
        return "Failed"
    return "Successful" if holds["successCondition"] else "Inconclusive"


def flagger(server: Served, name: str, version: str) -> str:
    """What Flagger does with its webhooks: it posts, and reads the status alone."""
    canary = yaml.safe_load((DEPLOY / "flagger.yaml").read_text())
    body = {"name": "smollm2", "namespace": "default", "phase": "WaitingPromotion", "metadata": {}}

    def accepted(hook: dict[str, Any]) -> bool:
        url = urlsplit(hook["url"])
        assert url.path == "/verdict/smollm2/challenger"
        path = f"/verdict/{name}/{version}"
        answer = web.post(f"{server.url}{path}?{url.query}", json=body, headers=HEADERS, timeout=120)
        return answer.status_code <= 202

    hooks = {hook["type"]: accepted(hook) for hook in canary["spec"]["analysis"]["webhooks"]}
    if hooks["rollback"]:
        return "rolled back"
    return "promoted" if hooks["confirm-promotion"] else "waits"


@pytest.mark.parametrize(
    ("outcome", "argo_says", "flagger_does"),
    [
        (Outcome.PASS, "Successful", "promoted"),
        (Outcome.FAIL, "Failed", "rolled back"),
        (Outcome.INCONCLUSIVE, "Inconclusive", "waits"),
    ],
)
def test_controllers_act_on_an_outcome(server: Served, outcome: Outcome, argo_says: str, flagger_does: str) -> None:
    answer = get(server, judged.NAME, VERSIONS[outcome])
    assert answer.status_code == 200
    found = answer.json()
    jsonschema.validate(found, SCHEMA)
    assert (found["outcome"], found["model"], str(found["version"])) == (outcome, judged.NAME, VERSIONS[outcome])
    assert argo(server, judged.NAME, VERSIONS[outcome]) == argo_says
    assert flagger(server, judged.NAME, VERSIONS[outcome]) == flagger_does


def test_controllers_wait_for_a_version_that_is_not_there(server: Served) -> None:
    answer = get(server, judged.NAME, "9")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "version_not_found")
    assert argo(server, judged.NAME, "9") == "Error"
    assert flagger(server, judged.NAME, "9") == "waits"


def test_an_outcome_that_does_not_exist_is_refused(server: Served) -> None:
    answer = web.post(f"{server.url}/verdict/{judged.NAME}/1?outcome=pass", headers=HEADERS, timeout=120)
    assert answer.status_code == 400 and "INCONCLUSIVE" in answer.json()["error"]["message"]


def test_evidence_that_was_edited_is_no_verdict(registry: Path, server: Served) -> None:
    """The logged verdict says PASS where it said FAIL. Once it is put back it is found: refusals are not kept.

    By its alias, the last that was registered.
    """
    with tracking.connect(write=False) as client:
        run = client.get_run(client.get_model_version(judged.NAME, str(EDITED)).run_id)
    place = Path(run.info.artifact_uri) / "verdict" / "record.json"
    kept = place.read_text()
    try:
        place.write_text(kept.replace('"FAIL"', '"PASS"'))
        answer = get(server, judged.NAME, "challenger")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
        assert "not intact" in answer.json()["error"]["message"]
    finally:
        place.write_text(kept)
    found = get(server, judged.NAME, "challenger").json()
    assert (found["outcome"], found["version"]) == ("FAIL", EDITED)
