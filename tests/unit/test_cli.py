"""The command line: exit codes, messages without tracebacks, and what each command prints."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import requires
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import typer
from typer.main import get_command

from engines.bundle import EngineBundle, IOContract
from engines.kernels import cpu as native
from engines.kernels.cpu import LEVELS
from evals.check import Outcome
from pipeline.cli.doctor import GPU_PACKAGES, Finding, Status, diagnose, processor
from pipeline.cli.main import app, main, message
from pipeline.cli.panels.judge import _moved
from pipeline.cli.shared import with_options
from pipeline.registry.promotion import Move
from tapeout.artifact import ArtifactRef, Parents, ParentTypes, Record, create, load, load_header
from tapeout.errors import BuildError, ExitCode
from tapeout.fingerprint import Fingerprint
from tapeout.lineage import explain, fields
from tests import judged
from tests.file_server import Site, serve
from tests.registries import empty_registry
from tests.unit.test_generate import Scripted, characters

COMMANDS = [
    "generate",
    "serve",
    "engine",
    "gateway",
    "fleet",
    "keys",
    "usage",
    "gate",
    "keygen",
    "pull",
    "register",
    "summary",
    "shadow-verdict",
    "drift",
    "promote",
    "verify",
    "rollback",
    "report",
    "inspect",
    "plan",
    "capacity",
    "costs",
    "doctor",
    "stage",
    "recipe",
    "build",
    "export-checkpoint",
]
ROOT = Path(__file__).parents[2]
CODES = {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.INCONCLUSIVE: 3}


class Source(Record):
    artifact_type: ClassVar[str] = "Source"
    parent_types: ClassVar[ParentTypes] = {"graph": ("Source",), "source": ("Source",), "calibration": ("Calibration",)}
    versions: dict[str, str]
    rows: tuple[dict[str, int], ...]


def write_source(folder: Path, text: str = "weights", parents: Parents | None = None) -> str:
    with create(folder, Source) as draft:
        (draft.folder / "data.bin").write_text(text)
        record = Source(versions={"onnx": "1.23.2"}, rows=tuple({"layer": i} for i in range(40)))
        draft.finish(record, parents=parents or {})
    return load(folder, Source).digest


KL = {Outcome.PASS: 0.01, Outcome.INCONCLUSIVE: 0.03, Outcome.FAIL: 0.345}


def write_verdict(artifacts: Path, outcome: Outcome) -> None:
    """A verdict, what it was reached on, and the recipe that it was reached by."""
    judged.write_run(artifacts, evidence=judged.good(KL[outcome]))
    shutil.rmtree(artifacts / "report")
    judged.write_params(artifacts.parent / "params.yaml", judged.recipe())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: Output) -> None:
    assert main([command, "--help"]) == 0
    assert "Example" in capsys.readouterr().out


def test_the_list_of_commands_is_complete(capsys: Output) -> None:
    group: Any = get_command(app)
    assert sorted(group.commands) == sorted(COMMANDS)
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


@dataclass(frozen=True, kw_only=True)
class InnerOptions:
    second: Annotated[int, typer.Option(min=1)] = 2
    third: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    first: Annotated[str, typer.Argument()]
    inner: InnerOptions
    fourth: Annotated[bool, typer.Option("--fourth")] = False


def test_fields_of_dataclasses_become_options_in_their_order_and_come_back() -> None:
    given: list[tuple[OuterOptions, int]] = []
    words = typer.Typer()

    @words.command()
    @with_options
    def command(outer: OuterOptions, fifth: int = 5) -> None:  # pyright: ignore[reportUnusedFunction]
        """Says nothing."""
        given.append((outer, fifth))

    made = get_command(words)
    assert [option.name for option in made.params][:5] == ["first", "second", "third", "fourth", "fifth"]
    assert made.help == "Says nothing."
    made(["a"], standalone_mode=False)
    made(["b", "--second", "3", "--third", "x", "--third", "y", "--fourth", "--fifth", "6"], standalone_mode=False)
    assert given == [
        (OuterOptions(first="a", inner=InnerOptions()), 5),
        (OuterOptions(first="b", inner=InnerOptions(second=3, third=["x", "y"]), fourth=True), 6),
    ]
    with pytest.raises(Exception, match="greater than or equal to 1"):
        made(["a", "--second", "0"], standalone_mode=False)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_gate_enforces_and_summary_only_reports(outcome: Outcome, here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", outcome)
    assert main(["gate"]) == CODES[outcome]
    printed = capsys.readouterr().out
    assert outcome.value in printed and "mean KL on held-out text" in printed and "≤ 0.03" in printed
    assert main(["summary"]) == 0
    printed = capsys.readouterr().out
    assert outcome.value in printed and "report  none at" in printed
    assert ("tapeout promote" in printed) == (outcome is Outcome.PASS)


def test_gate_prints_json_for_scripts(here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", Outcome.FAIL)
    assert main(["gate", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["outcome"], printed["exit_code"], printed["checks"][0]["name"]) == ("FAIL", 1, "executed")


def test_no_verdict_is_broken_and_never_a_pass(here: Path, capsys: Output) -> None:
    assert main(["gate"]) == ExitCode.BROKEN
    captured = capsys.readouterr()
    assert "there is no folder artifacts/verdict" in captured.err and "remedy" in captured.err
    assert "Traceback" not in captured.err and not captured.out


def test_a_verdict_about_another_engine_or_other_evidence_is_refused(here: Path, capsys: Output) -> None:
    artifacts = here / "artifacts"
    write_verdict(artifacts, Outcome.PASS)
    assert main(["gate"]) == 0
    built = load_header(artifacts / "candidate").parents
    judged.write_bundle(artifacts / "candidate", "rebuilt", **built)
    assert main(["gate"]) == ExitCode.BROKEN
    assert "the verdict judged candidate" in capsys.readouterr().err
    judged.write_bundle(artifacts / "candidate", "one", **built)
    assert main(["gate"]) == 0
    judged.write_evidence(artifacts, judged.good(0.011), None)  # reports that the verdict has not seen
    assert main(["gate"]) == ExitCode.BROKEN
    assert "dvc repro gate" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["candidate", "baseline", "quantized", "evaluation", "parity", "benchmark"])
def test_a_verdict_whose_evidence_is_gone_is_refused(folder: str, here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", Outcome.PASS)
    shutil.rmtree(here / "artifacts" / folder)
    assert main(["gate"]) == ExitCode.BROKEN
    assert folder in capsys.readouterr().err


def test_a_changed_engine_file_is_refused(here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", Outcome.PASS)
    (here / "artifacts/candidate/model.onnx").write_text("eno")  # of the same size
    assert main(["gate"]) == ExitCode.BROKEN
    assert "model.onnx has sha256" in capsys.readouterr().err


def test_a_verdict_by_other_bounds_is_refused(here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", Outcome.PASS)
    judged.write_params(here / "params.yaml", judged.recipe(gate={"max_kl": 0.02}))
    assert main(["gate"]) == ExitCode.BROKEN
    assert "gate.max_kl is 0.03 there and 0.02 in force (looser than in force)" in capsys.readouterr().err


def test_an_edited_verdict_is_refused(here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", Outcome.FAIL)
    record = here / "artifacts/verdict/record.json"
    record.write_text(record.read_text().replace('"FAIL"', '"PASS"'))
    assert main(["gate"]) == ExitCode.BROKEN
    assert "was edited" in capsys.readouterr().err


def test_report_prints_its_path(here: Path, capsys: Output) -> None:
    assert main(["report"]) == ExitCode.BROKEN
    page = here / "artifacts/report/report.html"
    page.parent.mkdir(parents=True)
    page.write_text("<html>")
    capsys.readouterr()
    assert main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(page)


def test_inspect_walks_to_every_ancestor(here: Path, capsys: Output) -> None:
    first = write_source(here / "a/source")
    second = write_source(here / "a/graph", "graph", {"source": ArtifactRef("Source", first)})
    write_source(
        here / "a/quantized",
        "q",
        {"graph": ArtifactRef("Source", second), "calibration": ArtifactRef("Calibration", "f" * 64)},
    )
    found = explain(Path("a/quantized"))
    known = {parent.name: parent for parent in found.parents}
    assert known["graph"].folder == Path("a/graph")
    assert known["graph"].parents[0].folder == Path("a/source")
    assert known["calibration"].folder is None
    assert main(["inspect", "a/quantized"]) == 0
    printed = capsys.readouterr().out
    assert "onnx" in printed and "28 more" in printed and "graph: Source a/graph" in printed
    assert "calibration: Calibration not beside this artifact" in printed
    assert main(["inspect", "a/quantized/record.json", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["record"]["rows"]) == 40


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda f: (f / "data.bin").write_text("WEIGHTS"), "data.bin changed"),
        (lambda f: (f / "data.bin").unlink(), "data.bin is missing"),
        (
            lambda f: (f / "record.json").write_text((f / "record.json").read_text().replace("1.23.2", "9")),
            "was edited",
        ),
    ],
)
def test_inspect_finds_what_changed(spoil: Callable[[Path], Any], problem: str, here: Path, capsys: Output) -> None:
    write_source(here / "x")
    spoil(here / "x")
    assert main(["inspect", "x"]) == ExitCode.BROKEN
    assert problem in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_not_called_unfinished(here: Path, capsys: Output) -> None:
    for command in (["inspect", "artifacts/canddate"], ["serve", "artifacts/canddate"]):
        assert main(command) == ExitCode.BROKEN
        assert "there is no folder artifacts/canddate" in capsys.readouterr().err


def test_inspect_of_the_parent_folder_names_what_is_in_it(here: Path, capsys: Output) -> None:
    write_source(here / "a/source")
    assert main(["inspect", "a"]) == ExitCode.BROKEN
    assert "one of those in it: source" in capsys.readouterr().err


def test_fields_of_nested_records() -> None:
    single, tables = fields({"io": {"slots": 2, "layers": [{"heads": 3}], "kv": {"a": 1}}, "empty": [], "none": None})
    assert single == {"io.slots": 2, "empty": [], "none": None}
    assert tables == {"io.layers": [{"heads": 3}], "io.kv": [{"name": "a", "value": 1}]}


def write_bundle(folder: Path, target: str, features: tuple[str, ...]) -> None:
    """A bundle whose text files are real, for a machine that no test runs on."""
    with create(folder, EngineBundle) as draft:
        characters().save(str(draft.folder / "tokenizer.json"))
        (draft.folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
        )
        (draft.folder / "tokenizer_config.json").write_text("{}")
        record = EngineBundle(
            target=target,
            precision="float32",
            io=IOContract(inputs=(), state=(), max_tokens=64, slots=4, vocab_size=256),
            hardware=(Fingerprint(machine="none", features=features, libraries={}),),
            operator_counts={"MatMul": 3},
            passes=(),
            weight_bytes=1,
            step_bytes=1,
            plan={},
            linear_outputs=(),
            stop_tokens=(characters().encode("#").ids[0],),
        )
        draft.finish(record, parents={})


@pytest.fixture
def prompts(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """artifacts/candidate: a bundle whose files are real and whose engine says a fixed text; the prompts it was fed."""
    write_bundle(here / "artifacts/candidate", "ort-cpu", ())
    seen: list[str] = []

    class Recorded(Scripted):
        def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> Any:
            seen.append(characters().decode(list(tokens)))
            return super().prefill(slot, tokens, start, positions)

    def opened(folder: Path, *, threads: int, slots: int, public_key: Path | None) -> Recorded:
        return Recorded("héllo# never seen")

    monkeypatch.setattr("runtime.api.load_engine", opened)
    monkeypatch.setattr("pipeline.cli.generate.not_executable", lambda bundle: "")  # of the machine that it is for
    return seen


def test_generate_streams_the_answer_and_nothing_else(prompts: list[str], capsys: Output) -> None:
    assert main(["generate", "hi", "--max-new-tokens", "20", "--system", "be kind"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "héllo\n"
    assert "7 new (stop)" in captured.err
    assert prompts == ["s:be kind|u:hi|"]


def test_generate_raw_and_stop_strings(prompts: list[str], capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a file"))
    assert main(["generate", "-", "--raw", "--stop", "lo", "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out == "hél\n"
    assert prompts == ["from a file"]


@pytest.mark.usefixtures("prompts")
def test_generate_mistakes_are_messages(capsys: Output) -> None:
    assert main(["generate", "x" * 80]) == ExitCode.BROKEN
    assert main(["generate", "hi", "--temperature", "-1"]) == ExitCode.BROKEN
    assert main(["generate", "hi", "--bundle", "nowhere"]) == ExitCode.BROKEN
    assert main(["generate"]) == ExitCode.BROKEN
    captured = capsys.readouterr()
    assert captured.err.count("remedy") >= 2 and "Traceback" not in captured.err


@pytest.mark.usefixtures("prompts")
def test_interrupting_says_so_and_exits_130(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.api.load_engine", interrupted)
    assert main(["generate", "hi", "--max-new-tokens", "3"]) == 130
    captured = capsys.readouterr()
    assert "interrupted" in captured.err and "Traceback" not in captured.err


def test_a_reader_that_leaves_is_not_a_failed_gate(here: Path) -> None:
    write_verdict(here / "artifacts", Outcome.PASS)
    program = "import sys; from pipeline.cli.main import main; sys.exit(main(['gate']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert done.returncode == ExitCode.BROKEN
    assert not done.stderr


def test_control_c_in_a_real_process(here: Path) -> None:
    program = "import sys; from pipeline.cli.main import main; print(flush=True); sys.exit(main(['generate', '-']))"
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=here,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        # A job in the background ignores Ctrl-C and hands that on to its children; this one is to hear it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stderr is not None and child.stdout is not None
    child.stdout.readline()
    time.sleep(0.5)  # by then it waits for standard input, which never comes
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert b"interrupted" in child.stderr.read()


@pytest.mark.usefixtures("prompts")
def test_a_fault_of_ours_is_broken_and_debug_shows_where(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("runtime.api.load_engine", faulty)
    words = ["generate", "hi", "--max-new-tokens", "3"]
    assert main(words) == ExitCode.BROKEN
    err = capsys.readouterr().err
    assert "ZeroDivisionError: boom" in err and "Traceback" not in err
    assert main(["--debug", *words]) == ExitCode.BROKEN
    assert re.search(r"Traceback.*in faulty", capsys.readouterr().err, re.DOTALL)


def test_a_wrong_recipe_is_one_message(here: Path, capsys: Output) -> None:
    (here / "params.yaml").write_text("model: {source: 'file:x'}\ndata: {source: 'file:x'}\nquantise: {}\n")
    assert main(["doctor"]) == ExitCode.BROKEN
    assert "did you mean 'quantize'" in capsys.readouterr().err


def test_doctor_looks_at_a_machine_that_only_serves(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a missing recipe, package of the pipeline or registry, which it does without."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr("pipeline.cli.doctor.BUILD_PACKAGES", ("no-such-package-here",))
    assert main(["doctor", "--json"]) == ExitCode.PASS
    printed = json.loads(capsys.readouterr().out)
    assert printed["healthy"] and not printed["services"]
    (building,) = [one for one in printed["abilities"] if one["subject"].startswith("build")]
    assert building["status"] == "absent" and "there is no recipe" in building["found"]
    assert "onnxruntime" in {one["subject"] for one in printed["software"]}
    assert main(["doctor", "--params", "other.yaml"]) == ExitCode.BROKEN
    assert "other.yaml" in capsys.readouterr().err


def test_doctor_finds_a_missing_source(here: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (here / "model").mkdir()
    recipe = here / "params.yaml"
    recipe.write_text(f"model: {{source: 'file:{here}/model'}}\ndata: {{source: 'file:{here}/absent'}}\n")
    assert main(["doctor"]) == ExitCode.BROKEN
    assert re.search(r"no: (disk, )?source", capsys.readouterr().out)  # the disk may be full, too
    (here / "absent").mkdir()
    code = main(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["healthy"] == (code == 0)
    assert {finding["status"] for finding in printed["services"]} == {"ok"}


@pytest.mark.parametrize(("status", "remedy"), [(401, "MLFLOW_TRACKING_TOKEN"), (500, "the server's log")])
def test_doctor_names_the_status_of_a_registry_that_refuses(status: int, remedy: str) -> None:
    from pipeline.cli.doctor import registry

    with serve(Site({"/health": b"OK"}, refusals=[status])) as site:
        refused, healthy = registry(site.url), registry(site.url)
    assert refused.status is Status.MISSING and f"answers HTTP {status}" in refused.found and remedy in refused.remedy
    assert healthy.status is Status.OK
    assert "no MLflow server answers" in registry(site.url).found


@pytest.mark.parametrize("name", GPU_PACKAGES)
def test_what_doctor_says_to_install_changes_its_own_row(name: str) -> None:
    remedy = GPU_PACKAGES[name]
    extra = re.search(r'pip install "\.\[([\w-]+)\]"', remedy)
    if extra:
        needed = [line for line in requires("tapeout") or [] if line.endswith(f'extra == "{extra[1]}"')]
        assert any(line.startswith(f"{name}==") for line in needed)
    else:
        assert f"`pip install {name}`" in remedy


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("tensorrt", "tensorrt", "pip install tensorrt"),
        ("tensorrt_rtx_bindings", "tensorrt-rtx-cu13-bindings", '[tensorrt-rtx]"'),
    ],
)
def test_a_build_without_tensorrt_says_what_doctor_says(
    module: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.targets.tensorrt.compiler import load_module

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BuildError) as caught:
        load_module(module)
    assert command in caught.value.remedy and command in GPU_PACKAGES[package]


def test_doctor_names_instruction_sets_and_their_absence() -> None:
    fast = processor("CPU", ("avx2", "avx512_vnni"))
    assert fast.status is Status.OK and "AVX-512 VNNI" in fast.found
    assert processor("CPU", ("avx2",)).status is Status.LIMITED


def test_doctor_tells_which_native_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.cli.doctor import native_kernels

    assert [native_kernels(level).found for level in LEVELS] == [level.name for level in LEVELS]
    with monkeypatch.context() as refused:
        refused.setattr("pipeline.cli.doctor.amx_refusal", lambda: "Linux does not let this process use AMX")
        found = native_kernels(LEVELS[1])
    assert (found.status, found.found) == (Status.LIMITED, f"{LEVELS[1].name}: Linux does not let this process use AMX")
    monkeypatch.setattr(native, "level", lambda: None)
    monkeypatch.setattr(native, "cpu_features", lambda: ())
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    none = native_kernels(None)
    assert none.status is Status.MISSING
    assert none.found == "native kernels need avx2, fma, f16c, which this processor lacks"
    assert "another machine" in none.remedy


def test_doctor_tells_an_untested_version_and_an_absent_package() -> None:
    from pipeline.cli.doctor import package, pinned

    assert package("pydantic", pinned()).status is Status.OK
    assert package("pydantic", {"pydantic": "1.0"}).status is Status.LIMITED
    assert package("no-such-package-here", {}).status is Status.MISSING


@pytest.mark.usefixtures("prompts")
def test_doctor_says_whether_a_bundle_runs_here(here: Path) -> None:
    from pipeline.cli.doctor import bundle as examine

    found: Finding = examine(here / "artifacts/candidate")
    assert found.status is Status.BROKEN and "other hardware" in found.found and "dvc repro" in found.remedy
    diagnosis = diagnose(None, here)
    assert diagnosis.abilities[-1] == found and not diagnosis.healthy


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda record: record.unlink(), "no record.json"),
        (lambda record: record.write_bytes(b"\xff"), "is not JSON"),
        (lambda record: record.write_text(record.read_text().replace('"size_bytes": 2', '"size_bytes": 3')), "edited"),
        (lambda record: (record.parent / "chat_template.jinja").unlink(), "is missing"),
    ],
)
def test_doctor_shows_a_bundle_that_does_not_load_as_broken(
    here: Path, spoil: Callable[[Path], Any], found: str
) -> None:
    from pipeline.cli.doctor import bundle as examine

    spoil(here / "artifacts/candidate/record.json")
    finding = examine(here / "artifacts/candidate")
    assert finding.status is Status.BROKEN and found in finding.found
    assert "dvc repro" in finding.remedy


def test_doctor_asks_the_target_what_selects_its_kernels(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle for a GPU is compared with the GPU that is here, not with the processor."""
    from engines.targets import tensorrt
    from pipeline.cli.doctor import bundle as examine

    monkeypatch.setattr(tensorrt.TARGET, "features", lambda: ("sm80",))
    write_bundle(here / "artifacts/candidate", "tensorrt", ("sm89",))
    finding = examine(here / "artifacts/candidate")
    assert finding.status is Status.BROKEN and "lacks sm89" in finding.found and "also has sm80" in finding.found


@pytest.mark.parametrize("outcome", list(Outcome))
def test_gate_in_github_annotates_summarizes_and_keeps_its_exit_code(
    outcome: Outcome, here: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_verdict(here / "artifacts", outcome)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here / "step.md"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(here / "output"))
    assert main(["gate"]) == CODES[outcome]
    lines = capsys.readouterr().out.splitlines()
    token = lines[0].removeprefix("::stop-commands::")
    end = lines.index(f"::{token}::")
    assert len(token) >= 32 and "Verdict" in "".join(lines[:end])
    kind = {Outcome.PASS: "notice", Outcome.FAIL: "error", Outcome.INCONCLUSIVE: "warning"}[outcome]
    assert lines[end + 1].startswith(f"::{kind} ") and "title=gate%3A" in lines[end + 1]
    if outcome is not Outcome.PASS:
        assert "file=params.yaml,line=" in lines[end + 1]
    assert f"Tapeout gate: {outcome.value}" in (here / "step.md").read_text()
    assert f"outcome={outcome.value}\n" in (here / "output").read_text()
    assert {path.name for path in (here / "artifacts/ci").iterdir()} == {
        "verdict.json", "junit.xml", "tapeout.sarif", "statement.json",
    }  # fmt: skip
    assert main(["gate", "--json"]) == CODES[outcome]
    captured = capsys.readouterr()
    assert json.loads(captured.out)["outcome"] == outcome.value
    assert f"::{kind} " in captured.err


def test_gate_writes_the_asked_formats_and_no_other(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_verdict(here / "artifacts", Outcome.FAIL)
    assert main(["gate"]) == 1
    assert not (here / "artifacts/ci").exists()
    monkeypatch.setenv("GITLAB_CI", "true")
    assert main(["gate", "--format", "junit", "--out", "there"]) == 1
    assert [path.name for path in (here / "there").iterdir()] == ["junit.xml"]
    assert main(["gate", "--format", "none"]) == 1
    assert not (here / "artifacts/ci").exists()


def test_no_verdict_in_github_is_an_annotation(here: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["gate"]) == ExitCode.BROKEN
    captured = capsys.readouterr()
    assert (
        captured.out.startswith("::error title=gate%3A no valid verdict::there is no folder artifacts/verdict")
        and "%0A" in captured.out
    )
    assert not (here / "artifacts").exists()


def test_a_format_that_is_unknown_or_cannot_be_written_is_broken(here: Path, capsys: Output) -> None:
    write_verdict(here / "artifacts", Outcome.PASS)
    assert main(["gate", "--format", "xml"]) == ExitCode.BROKEN
    assert "expected: --format with github, json" in capsys.readouterr().err
    (here / "taken").write_text("a file")
    assert main(["gate", "--format", "junit", "--out", "taken"]) == ExitCode.BROKEN
    captured = capsys.readouterr()
    assert "cannot write taken/junit.xml" in captured.err and "PASS" not in captured.out


def test_the_comment_compares_with_the_champion_of_the_registry(
    here: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.registry.promotion import promote
    from pipeline.registry.register import register

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here}/mlflow.db")
    recipe = judged.recipe()
    judged.write_params(here / "params.yaml", recipe)
    comment = ["gate", "--format", "comment", "--out", "out", "--plots-url", "https://x.example/p/"]
    verdict = judged.write_run(here / "artifacts", "one", evidence=judged.good(0.01))
    assert main(comment) == 0
    assert "is registered, so there is nothing to compare with" in (here / "out/comment.md").read_text()
    assert "https://x.example/p/kl.svg" in (here / "out/comment.md").read_text()
    assert not (here / "mlflow.db").exists(), "looking does not make a registry"
    empty_registry(here)
    register(recipe, verdict, load(here / "artifacts/candidate", EngineBundle), here / "artifacts")
    promote(recipe)
    assert main(comment) == 0
    assert "This engine is the champion, version 1" in (here / "out/comment.md").read_text()
    judged.write_run(here / "artifacts", "two", against=verdict.record.candidate, evidence=judged.good(0.345))
    assert main(comment) == 1
    text = (here / "out/comment.md").read_text()
    assert "Against the champion, version 1" in text
    worse = text.split("**Worse**")[1]
    assert "mean KL on held-out text, nats" in worse and "**Better**" not in worse


def test_register_says_what_signed(here: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(here))
    judged.write_params(here / "params.yaml", judged.recipe())
    judged.write_run(here / "artifacts", "one", evidence=judged.good(0.01))
    assert main(["register"]) == 0
    assert "not signed: no --key was given" in capsys.readouterr().out
    assert main(["keygen"]) == 0
    capsys.readouterr()
    assert main(["register", "--key", "tapeout.key"]) == 0
    assert "verdict and bundle are signed with tapeout.key" in capsys.readouterr().out
    assert main(["register", "--key", "tapeout.key", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signed_with"] == "tapeout.key"


@pytest.mark.parametrize("command", ["inspect", "verify", "serve", "generate", "engine", "export-checkpoint"])
@pytest.mark.parametrize(("name", "found"), [("nowhere", "there is no folder nowhere"), ("file", "file is a file")])
def test_the_folder_that_was_named_is_what_is_missing(
    here: Path, capsys: Output, command: str, name: str, found: str
) -> None:
    (here / "file").touch()
    more = {
        "engine": ["--listen", "unix:socket"],
        "export-checkpoint": ["--format", "gguf", "--to", "out"],
        "generate": ["--bundle"],
    }.get(command, [])
    words = ["x", *more, name] if command == "generate" else [name, *more]
    assert main([command, *words]) == ExitCode.BROKEN
    assert capsys.readouterr().err.startswith(f"error: {found}\n")


@pytest.mark.parametrize(
    ("words", "found", "remedy"),
    [
        (["inspect", "nowhere"], "there is no folder nowhere", "check the path"),
        (["gate"], "artifacts/verdict", "dvc repro"),
        (["costs"], "no params.yaml", ""),
        (["plan", "--params", "nowhere.yaml"], "nowhere.yaml", ""),
        (["usage", "--from", "soon"], "soon", ""),
        (["inspect"], "Missing argument", ""),
        (["plan", "--nothing"], "--nothing", ""),
        (["nothing"], "nothing", ""),
        (["capacity", "--rate", "x"], "--rate", ""),
        (["fleet", "status", "nowhere.yaml"], "nowhere.yaml", ""),
    ],
)
def test_a_script_reads_errors_as_json_too(
    here: Path, capsys: Output, words: list[str], found: str, remedy: str
) -> None:
    assert main([*words, "--json"]) == ExitCode.BROKEN
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert set(error) == {"found", "expected", "remedy"} and found in error["found"] and remedy in error["remedy"]
    assert printed.err  # for who looks on
    assert main(words) == ExitCode.BROKEN and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "disk space"), (errno.EACCES, "permissions")]
)
def test_an_error_of_the_system_is_no_fault_of_ours(number: int, remedy: str) -> None:
    said = message(OSError(number, os.strerror(number), "/some/file"))
    assert remedy in said and "/some/file" in said and "fault in tapeout" not in said
    assert "fault in tapeout" in message(OSError(errno.EBADF, "planted"))


def test_a_promotion_says_what_moves_a_fleet() -> None:
    """It moves an alias alone. Planted: a user waits for engines that nobody tells."""
    done = Move("m", 7, 6, True, "version 7 of m is champion")
    assert "tapeout fleet release FILE models:/m/7 --gateway URL" in _moved(done)
    assert _moved(replace(done, changed=False)) == done.message
