"""The files of a fleet for compose and Kubernetes: valid, and they name only what exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from pipeline.cli.main import app
from runtime.gateway.fleet.discovery import FleetFile
from runtime.gateway.operations.health import Health
from tests.serving_client import LocalClient

FOLDER = Path(__file__).parents[2] / "deploy" / "fleet"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
MANIFESTS: list[Any] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
KUBERNETES = "1.34"
OURS = [name for name in COMPOSE["services"] if name != "postgres"]


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command of ours."""
    group: Any = get_command(app)
    return group.commands[words[0]].make_context(words[0], list(words[1:])).params


def of(kind: str, name: str = "") -> list[Any]:
    return [one for one in MANIFESTS if one["kind"] == kind and name in ("", one["metadata"]["name"])]


def check_compose(path: Path) -> bool:
    program = Path(sys.executable).parent / "check-jsonschema"
    words = [str(program), "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(words, capture_output=True).returncode == 0


def test_the_compose_file_fits_its_schema(tmp_path: Path) -> None:
    assert check_compose(FOLDER / "compose.yaml")
    wrong = COMPOSE | {"services": COMPOSE["services"] | {"gateway-1": {"comand": ["gateway"]}}}
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(wrong))
    assert not check_compose(tmp_path / "compose.yaml")


@pytest.mark.parametrize("name", OURS)
def test_the_commands_of_compose_parse_and_name_what_is_mounted(name: str) -> None:
    service = COMPOSE["services"][name]
    options = parsed(service["command"])
    mounted = [volume.split(":") for volume in service["volumes"]]
    targets = [target for _, target, *_ in mounted] + [f"/run/secrets/{secret}" for secret in service["secrets"]]
    for source, *_ in mounted:
        assert source in COMPOSE["volumes"] or source == "../../artifacts" or (FOLDER / source).exists()
    named = [options.get(one) for one in ("engines", "source", "key_file", "usage_journal")]
    assert all(any(str(path).startswith(target) for target in targets) for path in named if path is not None)
    assert set(service["secrets"]) <= set(COMPOSE["secrets"])
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds > options.get("drain_seconds", 0)


def test_what_shares_a_fleet_in_compose_names_one_database_and_one_key() -> None:
    found = {name: parsed(COMPOSE["services"][name]["command"]) for name in OURS}
    fleet = FleetFile.read(FOLDER / "fleet.yaml")
    assert len(found) == 4
    databases = {
        value for one in found.values() for name, value in one.items() if "database" in name or name == "register"
    }
    assert databases - {None} == {fleet.table} and "@postgres/" in str(fleet.table)
    keys = {str(one["key_file"]) for one in found.values() if "key_file" in one}
    assert keys == {str(fleet.key)}
    advertised = {name: one["advertise"] for name, one in found.items() if "advertise" in one}
    assert advertised == {name: f"tcp:{name}:7000" for name in ("engine-1", "engine-2")}
    journals = [COMPOSE["services"][name]["volumes"][1] for name in ("gateway-1", "gateway-2")]
    assert len(set(journals)) == 2, "each gateway has a journal of its own"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_manifests_fit_the_schemas_of_kubernetes(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_a_manifest_that_is_wrong_would_be_noticed() -> None:
    (wrong,) = json.loads(json.dumps(of("Deployment", "tapeout-gateway")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["tapeout-engine", "tapeout-gateway"])
def test_a_deployment_is_whole(name: str) -> None:
    (deployment,) = of("Deployment", name)
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        of("PodDisruptionBudget", name)[0]["spec"]["selector"]["matchLabels"],
    ]
    services = [one for one in of("Service") if one["spec"]["selector"] == labels]
    assert selectors == [labels] * 2 and len(services) == 1 and deployment["spec"]["replicas"] == 2
    options = parsed(container["args"])
    (port,) = container["ports"]
    assert services[0]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert (
        options.get("port") == port["containerPort"] or options.get("listen") == f"tcp:0.0.0.0:{port['containerPort']}"
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in spec["volumes"]} == set(mounts)
    named = [options.get(one) for one in ("engines", "source", "key_file", "keys_file", "usage_journal")]
    assert all(any(str(path).startswith(place) for place in mounts.values()) for path in named if path is not None)
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > waits + options.get("drain_seconds", 0)


def test_probes_ask_paths_that_exist() -> None:
    (container,) = of("Deployment", "tapeout-gateway")[0]["spec"]["template"]["spec"]["containers"]
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness", "startup")}
    routes = {route.path for route in Health(LocalClient(), lambda: False).routes()}
    assert paths == {"/ready", "/health"} <= routes


def test_gateways_on_kubernetes_find_the_engines_and_may_look_for_them(tmp_path: Path) -> None:
    (text,) = of("ConfigMap")[0]["data"].values()
    (tmp_path / "fleet.yaml").write_text(text)
    fleet = FleetFile.read(tmp_path / "fleet.yaml")
    assert fleet.kubernetes is not None and str(fleet.key) == "/etc/tapeout/secret/engine.key"
    (service,) = of("Service", fleet.kubernetes.service)
    assert service["spec"]["clusterIP"] == "None"
    assert fleet.kubernetes.port in [port["name"] for port in service["spec"]["ports"]]
    (role,), (binding,) = of("Role"), of("RoleBinding")
    assert role["rules"] == [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}]
    pods = of("Deployment", "tapeout-gateway")[0]["spec"]["template"]["spec"]
    assert pods["serviceAccountName"] == binding["subjects"][0]["name"] == of("ServiceAccount")[0]["metadata"]["name"]
