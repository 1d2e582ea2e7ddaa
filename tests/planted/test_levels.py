"""One bundle for several processors: it runs at each level that is here, and is served where evidence covers one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.bundle import EngineBundle
from engines.compile import build
from engines.kernels import cpu as native
from engines.kernels.cpu import LEVELS, compiler, serving
from engines.kernels.operators import OPERATORS
from engines.load import at_level, graph_target, load
from engines.protocol import Entry, FloatArray, Result
from engines.sequences import Sequences
from engines.step_inputs import result_of
from evals.check import Outcome
from evals.items import read_items, write_items
from evals.kinds.parity import ParityReport
from evals.kinds.parity.reference_logits import REFERENCE_FILE, LevelItem, ReferenceLogits
from evals.kinds.serving import ServedItem
from evals.level import LEVEL_ITEMS, SERVED_ITEMS, SLOTS, LevelVerdict
from evals.level_check import check_level
from evals.statement import statement
from evals.verdict import Verdict
from pipeline.cli.main import main
from pipeline.cli.serve import require_judged
from pipeline.registry.access import VersionReference
from pipeline.registry.levels import evidence_folder, level_to_serve
from pipeline.registry.promotion import promote
from pipeline.registry.pull import Requirements, pull
from pipeline.registry.register import register
from quantization.compressed_tensors import open_checkpoint
from runtime.engine.draw_check import draw_counts
from tapeout import artifact, fingerprint
from tapeout.artifact import Artifact, ArtifactRef
from tapeout.errors import ArtifactError, BuildError, EvidenceError, FingerprintError, RequestError, ResourceError
from tapeout.quantized import round_to_nearest
from tapeout.schemes import Scheme
from tapeout.signing import generate_keys, sign, signature_path, write_signature
from tests import judged
from tests.exported import family_graph
from tests.lowering import FixedWeights
from tests.planted.test_pressure import answerer, decode
from tests.planted.test_registry import edit_record
from tests.registries import empty_registry

BEST, *_, LEAST = (level for level in LEVELS if level.machine == "x86_64")
BYTES = Scheme(bits=8, group_size=32, symmetric=True)
# Subtracts the residual before a norm.
PLANTED = ("store(sum + i, load(x + i) + load(residual + i));", "store(sum + i, load(x + i) - load(residual + i));")
pytestmark = pytest.mark.skipif(native.level() in (None, LEAST), reason="this processor has one level or none")


def builder(graph: Artifact[Any], target: str = "ort-cpu") -> Callable[..., Artifact[EngineBundle]]:
    """Writes bundles in which operators of ours do all the work."""
    checkpoint = open_checkpoint(graph.folder)
    weights = {name: checkpoint.weight(name) for name in checkpoint.names()}
    tensors = {name: round_to_nearest(weight, BYTES) for name, weight in weights.items() if weight.ndim == 2}

    def write(folder: Path, _: str, **parents: ArtifactRef) -> Artifact[EngineBundle]:
        return build(
            graph,
            FixedWeights({name: tensors.get(name, weight) for name, weight in weights.items()}),
            folder,
            target=graph_target(target),
            precision="w8",
            slots=4,
            kv_scales={},
            parents=parents,
        )

    return write


@pytest.fixture(scope="module")
def graph() -> Artifact[Any]:
    return family_graph("llama")


def judge_run(artifacts: Path, write: Callable[..., Artifact[EngineBundle]]) -> Artifact[Verdict]:
    """A run whose evidence is made up, but for the logits of the engine at the best level."""
    judged.write_run(artifacts, write_candidate=write)
    engine, kept = Sequences(load(artifacts / "candidate", threads=1)), ReferenceLogits()
    for number in range(artifact.load(artifacts / "parity", ParityReport).record.documents):
        tokens = [number + 1, *((7 * number + 3 * at) % 40 + 1 for at in range(29))]
        kept.add(tokens, engine.prefill(0, tokens, positions=range(30)))
    engine.close()
    made = artifact.load(artifacts / "parity", ParityReport)
    with artifact.create(artifacts / "with", ParityReport) as draft:
        for name in made.files:
            shutil.copy(made.folder / name, draft.folder / name)
        kept.save(draft.folder / REFERENCE_FILE)
        draft.finish(made.record, parents=made.parents)
    shutil.rmtree(artifacts / "parity")
    (artifacts / "with").rename(artifacts / "parity")
    return judged.judge(artifacts, judged.recipe())


@pytest.fixture
def artifacts(graph: Artifact[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    verdict = judge_run(tmp_path / "artifacts", builder(graph)).record
    assert (verdict.outcome, verdict.executed_on) == (Outcome.PASS, f"ort-cpu:{BEST.name}")
    return tmp_path / "artifacts"


def processor(patch: pytest.MonkeyPatch, *features: str) -> None:
    """As if the processor had no other features."""
    for module in (fingerprint, native, serving):
        patch.setattr(module, "cpu_features", lambda: features)


def test_a_bundle_runs_at_every_level_and_is_the_same_wherever_it_is_built(
    graph: Artifact[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = builder(graph)
    bundle = write(tmp_path / "bundle", "")
    assert [one.level for one in bundle.record.hardware] == [level.name for level in LEVELS]
    assert {level.file for level in LEVELS} <= set(bundle.files)
    assert {
        *bundle.record.operator_counts
    } <= OPERATORS.keys()  # so a session runs a step as one node, if its embedding is tied
    tokens, rows = list(range(1, 31)), {}
    here = [level for level in LEVELS if not level.refusal()]
    for level in here:
        engine = Sequences(load(bundle.folder, threads=1, level=level.name))
        rows[level.name] = engine.prefill(0, tokens, positions=range(30))
        engine.close()
    for level in here[1:]:
        assert abs(rows[level.name] - rows[here[0].name]).max() < 0.05
    processor(monkeypatch, "amx_int8", *LEAST.needed)
    assert at_level(bundle).record.hardware[0].level == LEAST.name
    assert write(tmp_path / "elsewhere", "").digest == bundle.digest
    with pytest.raises(FingerprintError, match=f"{BEST.name}: this CPU lacks avx512f"):
        load(bundle.folder, level=BEST.name)
    with pytest.raises(FingerprintError, match="not for riscv64-v"):
        load(bundle.folder, level="riscv64-v")
    processor(monkeypatch, "avx")
    with pytest.raises(FingerprintError, match="ort-cpu cannot run here: native kernels need avx2, fma, f16c"):
        load(bundle.folder)


def test_a_pinned_bundle_runs_at_its_level_only(graph: Artifact[Any], tmp_path: Path) -> None:
    bundle = builder(graph, f"ort-cpu:{LEAST.name}")(tmp_path / "bundle", "")
    assert [one.level for one in at_level(bundle).record.hardware] == [LEAST.name]
    load(bundle.folder, threads=1).close()
    with pytest.raises(FingerprintError, match=f"it has kernels for {LEAST.name}, not for {BEST.name}"):
        load(bundle.folder, level=BEST.name)


def test_an_edited_library_of_another_level_is_refused(graph: Artifact[Any], tmp_path: Path) -> None:
    bundle = builder(graph)(tmp_path / "bundle", "")
    path = bundle.folder / LEAST.file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=f"{LEAST.name}.so has sha256"):
        load(bundle.folder, level=BEST.name)


def test_a_level_is_served_once_it_is_verified(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = artifacts / "candidate"
    assert require_judged(candidate).level == BEST.name
    with monkeypatch.context() as patch:
        processor(patch, *LEAST.needed)
        with pytest.raises(FingerprintError, match=f"no evidence for {LEAST.name}, which this machine has") as refused:
            require_judged(candidate)
        assert f"`tapeout verify {candidate}`" in refused.value.remedy and BEST.name in refused.value.expected
        assert require_judged(candidate, unsafe=True).level == ""
        assert main(["verify", str(candidate), "--threads", "1"]) == 0
        assert f"at {LEAST.name}" in capsys.readouterr().out
        assert require_judged(candidate).level == LEAST.name
        processor(patch, "avx")
        with pytest.raises(FingerprintError, match="native kernels need avx2"):
            require_judged(candidate)
    assert require_judged(candidate).level == BEST.name
    found = artifact.load(evidence_folder(candidate, LEAST.name), LevelVerdict).record
    assert found.executed_on.level == LEAST.name and found.executed_on.features == LEAST.needed
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes.pop("speed") is Outcome.INCONCLUSIVE and set(outcomes.values()) == {Outcome.PASS}
    assert {"level_kl", "level_document_kl", "level_top_token", "serving_kl", "serving_greedy"} <= set(outcomes)


def test_wrong_kernels_of_a_level_fail(graph: Artifact[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judged level does not have the defect."""
    source = tmp_path / "source"
    shutil.copytree(compiler.SOURCE, source)
    kernel = source / "block_linear.c"
    text = kernel.read_text()
    assert PLANTED[0] in text
    kernel.write_text(text.replace(*PLANTED))
    compiled = compiler.library

    def library(level: native.Level) -> Path:
        return compiled(level, source if level == LEAST else None)

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "library", library)
        judge_run(tmp_path / "artifacts", builder(graph))
    candidate = tmp_path / "artifacts" / "candidate"
    assert main(["verify", str(candidate), "--level", LEAST.name, "--threads", "1"]) == 1
    processor(monkeypatch, *LEAST.needed)
    with pytest.raises(FingerprintError, match="no evidence for"):
        require_judged(candidate)


def test_nan_in_one_way_of_serving_is_refused(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prefill is right; a decode step of three sequences is not."""
    decode = Sequences.decode

    def planted(self: Sequences, tokens: list[int], lengths: list[int], *, first_slot: int = 0) -> FloatArray:
        rows = decode(self, tokens, lengths, first_slot=first_slot)
        if len(tokens) == 3:
            rows[1, 5] = np.nan
        return rows

    monkeypatch.setattr(Sequences, "decode", planted)
    assert main(["verify", str(artifacts / "candidate"), "--level", LEAST.name, "--threads", "1"]) == 2
    shown = capsys.readouterr().err
    assert "NaN or infinite logits at position" in shown and "path decode, slot 1, batch of 3 from slot 0" in shown
    assert not evidence_folder(artifacts / "candidate", LEAST.name).exists()


@pytest.mark.parametrize("longest", [1, 1000], ids=["steps of one token", "every step"])
def test_nan_that_the_engine_finds_is_laid_to_the_level(
    longest: int, artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(entry: Entry, logits: FloatArray) -> Result:
        return result_of(entry, logits * np.float32("nan") if len(entry.tokens) <= longest else logits)

    monkeypatch.setattr("engines.targets.ort_cpu.paged_engine.result_of", planted)
    assert main(["verify", str(artifacts / "candidate"), "--level", LEAST.name, "--threads", "1"]) == 2
    shown = capsys.readouterr().err
    assert f"at {LEAST.name} the engine's logits are not finite" in shown and "serve at another level" in shown
    assert not evidence_folder(artifacts / "candidate", LEAST.name).exists()


@pytest.mark.parametrize("failing", ["the first computes", "the second opens"])
def test_an_engine_is_closed_where_the_check_ends_early(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Planted: engines of a check that fails are left open."""
    closed: list[Sequences] = []
    close = Sequences.close

    def counted(self: Sequences) -> None:
        closed.append(self)
        close(self)

    def not_finite(*_: Any) -> Any:
        raise RequestError("logits that are not finite")

    def fails(folder: Path, *, slots: int, **options: Any) -> Any:
        if slots > SLOTS:
            raise ResourceError("not enough memory")
        return load(folder, slots=slots, **options)

    monkeypatch.setattr(Sequences, "close", counted)
    if failing == "the first computes":
        monkeypatch.setattr("evals.level_check.drawn_logits", not_finite)
    else:
        monkeypatch.setattr("evals.level_check.load", fails)
    assert main(["verify", str(artifacts / "candidate"), "--level", LEAST.name, "--threads", "1"]) == 2
    assert len(set(closed)) == 1


def test_a_parity_report_that_was_not_judged(artifacts: Path, tmp_path: Path) -> None:
    bundle = artifact.load(artifacts / "candidate", EngineBundle)
    verdict = artifact.load(artifacts / "verdict", Verdict)
    parity = artifact.load(artifacts / "parity", ParityReport)
    with artifact.create(tmp_path / "other", ParityReport) as draft:
        draft.finish(parity.record, parents=parity.parents)
    other = artifact.load(tmp_path / "other", ParityReport)
    with pytest.raises(EvidenceError, match=f"is about another parity report than {other.digest[:12]}"):
        check_level(bundle, verdict, other, LEAST.name, tmp_path / "level", draw_counts, answerer, decode)


def verified(artifacts: Path) -> Path:
    assert main(["verify", str(artifacts / "candidate"), "--level", LEAST.name, "--threads", "1"]) == 0
    return evidence_folder(artifacts / "candidate", LEAST.name)


def passes(body: dict[str, Any]) -> None:
    """Checks that say that something else was measured."""
    for check in body["record"]["checks"]:
        check["value"] = None if check["value"] is None else check["value"] / 2


def without(folder: Path, path: str, batch: int = 0) -> None:
    """``batch``: of this size alone, unless 0."""
    made, again = artifact.load(folder, LevelVerdict), folder.with_name("again")
    items = read_items(folder / SERVED_ITEMS, ServedItem)
    served = [item for item in items if item.path != path or (batch and item.batch != batch)]
    with artifact.create(again, LevelVerdict) as draft:
        shutil.copy(folder / LEVEL_ITEMS, draft.folder / LEVEL_ITEMS)
        write_items(draft.folder / SERVED_ITEMS, served)
        draft.finish(made.record, parents=made.parents)
    shutil.rmtree(folder)
    again.rename(folder)


def other_documents(folder: Path, change: Callable[[list[LevelItem]], list[LevelItem]]) -> None:
    made, again = artifact.load(folder, LevelVerdict), folder.with_name("again")
    with artifact.create(again, LevelVerdict) as draft:
        shutil.copy(folder / SERVED_ITEMS, draft.folder / SERVED_ITEMS)
        write_items(draft.folder / LEVEL_ITEMS, change(list(read_items(folder / LEVEL_ITEMS, LevelItem))))
        draft.finish(made.record, parents=made.parents)
    shutil.rmtree(folder)
    again.rename(folder)


def no_answers(body: dict[str, Any]) -> None:
    body["record"]["pressure"]["answers"] = []


def another_parity(body: dict[str, Any]) -> None:
    body["parents"]["parity"]["digest"] = "0" * 64


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda folder: (folder / SERVED_ITEMS).write_text(""), "0 bytes"),
        (lambda folder: edit_record(folder, passes), "checks that its items do not give"),
        (lambda folder: edit_record(folder, another_parity), "is of another parity"),
        (lambda folder: folder.rename(folder.with_name(BEST.name)), f"is of {LEAST.name}"),
        (lambda folder: without(folder, "greedy"), "has nothing on the path 'greedy'"),
        (lambda folder: without(folder, "running", 2), "has no step of batch size 2 on the path 'running'"),
        (lambda folder: without(folder, "drafts"), "has nothing on the path 'drafts'"),
        (lambda folder: edit_record(folder, no_answers), "has no answers under pressure with greedy"),
        (lambda folder: other_documents(folder, lambda items: items[1:]), "has 40 of the 41 documents"),
        (lambda folder: other_documents(folder, lambda items: [items[1], *items[1:]]), "more than once"),
        (
            lambda folder: other_documents(
                folder, lambda items: [items[0].model_copy(update={"kl_sum": -9.0}), *items[1:]]
            ),
            "1 of 41 documents have a non-finite or negative KL",
        ),
    ],
    ids=[
        *("items", "checks", "parity", "of another level", "a path", "a size", "drafts", "answers of the core"),
        *("a document", "a document twice", "a KL below zero"),
    ],
)
def test_edited_evidence_of_a_level_does_not_count(
    artifacts: Path,
    edit: Callable[[Path], object],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    edit(verified(artifacts))
    assert require_judged(artifacts / "candidate").level == BEST.name  # which was judged
    monkeypatch.setattr("pipeline.registry.levels.judged_level", lambda target, place: None)
    with pytest.raises(FingerprintError, match="no evidence for"):
        require_judged(artifacts / "candidate")
    assert found in caplog.text


def test_an_engine_that_takes_no_drafts_needs_none_at_another_level(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with recurrent state. Planted: its evidence was refused, whatever it said."""
    monkeypatch.setattr("evals.kinds.serving.running_paths.drafted_tokens", lambda has, settings: 0)
    evidence = judged.good()
    report = evidence.reports["serving"]
    record = report.record.model_copy(update={"draft_tokens": 0})
    without_drafts = replace(evidence, reports={**evidence.reports, "serving": replace(report, record=record)})
    monkeypatch.setattr(judged, "good", lambda: without_drafts)
    judge_run(artifacts, builder(family_graph("llama")))
    folder = verified(artifacts)
    assert all(item.path != "drafts" for item in read_items(folder / SERVED_ITEMS, ServedItem))
    processor(monkeypatch, *LEAST.needed)
    assert require_judged(artifacts / "candidate").level == LEAST.name


def test_evidence_of_another_bundle_or_verdict_does_not_count(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = verified(artifacts)
    edit_record(folder, lambda body: body["parents"]["verdict"].update(digest="0" * 64))
    assert require_judged(artifacts / "candidate").level == BEST.name
    processor(monkeypatch, *LEAST.needed)
    with pytest.raises(FingerprintError, match="no evidence for"):
        require_judged(artifacts / "candidate")


def test_evidence_of_a_level_without_a_signature(
    artifacts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    private, public = tmp_path / "t.key", tmp_path / "t.pub"
    generate_keys(private, public)
    candidate, verdict = artifacts / "candidate", artifact.load(artifacts / "verdict", Verdict)
    assert main(["verify", str(candidate), "--public-key", str(public)]) == 2
    assert "no signature at" in capsys.readouterr().err
    said = statement(judged.NAME, verdict, artifact.load_record(candidate, EngineBundle))
    write_signature(signature_path(candidate), sign(said, private))
    folder = verified(artifacts)
    assert require_judged(candidate, public_key=public).level == BEST.name
    processor(monkeypatch, *LEAST.needed)
    with pytest.raises(FingerprintError, match="no evidence for"):
        require_judged(candidate, public_key=public)
    assert "no signature at" in caplog.text
    assert main(["verify", str(candidate), "--threads", "1", "--key", str(private)]) == 0
    assert require_judged(candidate, public_key=public).level == LEAST.name
    edit_record(folder, passes)
    with pytest.raises(FingerprintError, match="no evidence for"):
        require_judged(candidate, public_key=public)
    shutil.rmtree(artifacts / "verdict")  # the signed statement names the level that was judged
    with pytest.raises(FingerprintError, match="no evidence for"):
        require_judged(candidate, public_key=public)


def test_what_cannot_be_verified(artifacts: Path, graph: Artifact[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(artifacts / "candidate"), "--level", "x86-64-v9"]) == 2
    assert "not for x86-64-v9" in capsys.readouterr().err
    shutil.rmtree(artifacts / "candidate")
    builder(graph, f"ort-cpu:{LEAST.name}")(artifacts / "candidate", "")
    assert main(["verify", str(artifacts / "candidate")]) == 2
    assert "is about bundle" in capsys.readouterr().err
    assert not evidence_folder(artifacts / "candidate", LEAST.name).exists()


def test_evidence_of_a_level_is_attached_to_a_version(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(tmp_path))
    bundle, verdict = (
        artifact.load(artifacts / "candidate", EngineBundle),
        artifact.load(artifacts / "verdict", Verdict),
    )
    register(judged.recipe(), verdict, bundle, artifacts)
    promote(judged.recipe())
    champion = VersionReference(judged.NAME, "champion")
    assert pull(champion, tmp_path / "bundles").levels == (BEST.name,)
    with monkeypatch.context() as patch:
        processor(patch, *LEAST.needed)
        before = pull(champion, tmp_path / "first")
        with pytest.raises(FingerprintError, match="tapeout verify models:/"):
            level_to_serve(artifact.load_record(before.folder, EngineBundle), before.levels, str(champion))
        assert main(["verify", str(champion), "--threads", "1"]) == 0
        there = pull(champion, tmp_path / "second")
        assert there.levels == (BEST.name, LEAST.name)
        pulled = artifact.load_record(there.folder, EngineBundle)
        assert level_to_serve(pulled, there.levels, str(champion)) == LEAST.name
        logged = next(path.parent for path in tmp_path.rglob(SERVED_ITEMS) if "mlruns" in str(path))
        items = logged / SERVED_ITEMS
        items.write_text(items.read_text().replace('"agree": 1', '"agree": 2'))
        assert pull(champion, tmp_path / "third").levels == (BEST.name,)
        assert "LevelVerdict is not intact" in caplog.text
    assert read_items(evidence_folder(there.folder, LEAST.name) / SERVED_ITEMS, ServedItem)


def test_unsigned_evidence_of_a_level_does_not_stop_a_pull_with_a_key(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = tmp_path / "t.key", tmp_path / "t.pub"
    generate_keys(private, public)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_registry(tmp_path))
    with monkeypatch.context() as patch:
        patch.setenv("TAPEOUT_PRIVATE_KEY", str(private))
        verdict = artifact.load(artifacts / "verdict", Verdict)
        register(judged.recipe(), verdict, artifact.load(artifacts / "candidate", EngineBundle), artifacts)
    promote(judged.recipe())
    champion, signed = VersionReference(judged.NAME, "champion"), Requirements(public_key=public)
    for level in (BEST, LEAST):
        assert main(["verify", str(champion), "--level", level.name, "--threads", "1"]) == 0
    assert pull(champion, tmp_path / "store", signed).levels == (BEST.name,)
    assert f"the evidence of {LEAST.name} does not count" in caplog.text
    words = ["--level", LEAST.name, "--threads", "1", "--key", str(private), "--public-key", str(public)]
    assert main(["verify", str(champion), *words]) == 0
    assert pull(champion, tmp_path / "store", signed).levels == (BEST.name, LEAST.name)


def test_a_bundle_of_foreign_levels_only_is_built_and_not_opened(
    graph: Artifact[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = builder(graph, f"ort-cpu:{BEST.name}")(tmp_path / "bundle", "")
    processor(monkeypatch, *LEAST.needed)
    with pytest.raises(FingerprintError, match="this CPU lacks avx512f"):
        load(bundle.folder)
    with pytest.raises(BuildError, match=f"{BEST.name}.so cannot run here: it needs avx512f"):
        serving.library_of(bundle)
