"""The artifacts of a judged run, with made-up evidence and weights: for tests of the gate command and of the registry.

Records, digests, lineage and verdict are real: the verdict is what the gate says of the evidence that is written here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import model_serializer

from engines.bundle import EngineBundle, IOContract
from evals.evidence import load_evidence
from evals.gate import gate
from evals.items import write_items
from evals.kind import Bounds, Evidence, Report
from evals.kinds.speed import Benchmark
from evals.known import kinds
from evals.verdict import Verdict
from pipeline.recipe import Recipe
from pipeline.report import write as report
from quantization.calibration import SAMPLES_FILE, CalibrationSample, samples_hash
from quantization.checkpoint import QuantizedModel
from quantization.plan import decisive
from tapeout.artifact import (
    Artifact,
    ArtifactRef,
    ParentTypes,
    Record,
    canonical_json,
    create,
    load,
    load_header,
    load_record,
)
from tests.fake_engine import MACHINE
from tests.kept import kept
from tests.report_example import example_report
from tests.unit.test_gate import (
    BASELINE,
    CANDIDATE,
    QUANTIZED,
    make,
    numbers,
    parity_items,
    quantized_model,
    shadow_items,
    task_items,
    text_items,
)

NAME = "tapeout-default"
SETTINGS: dict[str, Any] = {
    "model": {"source": "file:model"},
    "data": {"source": "file:data"},
    "build": {"slots": 4},
    "benchmark": {"batches": [1], "repeats": 5, "prompt_tokens": 1, "new_tokens": 1},
    "evaluate": {"tasks": ["arc", "piqa"], "items": 600, "documents": 60, "parity_documents": 40},
    "shadow": {"prompts": 60, "max_new_tokens": 48},
    "gate": {"min_items": 600, "min_text_documents": 60, "min_documents": 30, "min_shadow_prompts": 60},
    "register": {"model_name": NAME},
}


def recipe(**sections: Mapping[str, Any]) -> Recipe:
    """The recipe that the evidence here was measured by, with parameters of some sections replaced."""
    merged = {name: {**SETTINGS.get(name, {}), **changes} for name, changes in sections.items()}
    return Recipe.model_validate({**SETTINGS, **merged})


class Stub(Record):
    """A record of any type, with whatever fields and parents its type has in the pipeline."""

    artifact_type: ClassVar[str] = "Stub"
    name: str
    fields: dict[str, Any]

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.fields}


def write_stub(
    folder: Path, artifact_type: str, name: str, fields: Mapping[str, Any], lines: str = "", **parents: ArtifactRef
) -> ArtifactRef:
    """``fields``: of the record. ``lines``: of the file of calibration samples, where there is one."""
    allowed: ParentTypes = {name: (parent.artifact_type,) for name, parent in parents.items()}
    kind = type(
        artifact_type, (Stub,), {"artifact_type": artifact_type, "parent_types": allowed, "__module__": __name__}
    )
    with create(folder, kind) as draft:
        (draft.folder / "data.bin").write_text(name)
        if lines:
            (draft.folder / SAMPLES_FILE).write_text(lines)
        draft.finish(kind(name=name, fields=dict(fields)), parents=parents)
    return load_header(folder).ref


def write_calibration(folder: Path, graph: ArtifactRef, hashes: tuple[str, ...], by: Recipe) -> ArtifactRef:
    samples = [CalibrationSample(sample_hash=name, tokens=8, holdout=False) for name in hashes]
    fields = {"samples_hash": samples_hash(samples), "asked": by.calibrate.model_dump(mode="json")}
    lines = "".join(sample.model_dump_json() + "\n" for sample in samples)
    return write_stub(folder, "Calibration", "samples", fields, lines, graph=graph)


def write_bundle(folder: Path, weights: str, **parents: ArtifactRef) -> Artifact[EngineBundle]:
    with create(folder, EngineBundle) as draft:
        (draft.folder / "model.onnx").write_text(weights)
        record = EngineBundle(
            target="ort-cpu",
            precision="float32",
            io=IOContract(inputs=(), state=(), max_tokens=64, slots=4, vocab_size=256),
            hardware=(MACHINE,),
            operator_counts={},
            passes=(),
            weight_bytes=1,
            step_bytes=1,
            plan={},
            linear_outputs=(),
            stop_tokens=(1,),
        )
        draft.finish(record, parents=parents)
    return load(folder, EngineBundle)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same value with other digests."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: renamed(item, names) for key, item in value.items()}
    return [renamed(item, names) for item in value] if isinstance(value, list) else value


def write_evidence(artifacts: Path, evidence: Evidence, champion: ArtifactRef | None) -> None:
    """The reports of every kind, about the engines that lie beside them."""
    made = ("source", "graph", "quantized", "baseline", "candidate")
    refs = {name: load_header(artifacts / name).ref for name in made}
    judged = {BASELINE: "baseline", CANDIDATE: "candidate", QUANTIZED: "quantized"}
    names = {made_up: refs[role].digest for made_up, role in judged.items()}
    machine = load_record(artifacts / "candidate", EngineBundle).record.hardware[0]
    refs["champion"] = champion or refs["baseline"]
    for folder in dict.fromkeys(kind.folder for kind in kinds() if kind.needed == "executed"):
        members = [kind for kind in kinds() if kind.folder == folder and kind.needed == "executed"]
        found = evidence.reports[members[0].name]
        if members[0].name == "speed":
            sizes = {"threads": 1, "prompt_tokens": 1, "new_tokens": 1}
            sizes |= {"read_bandwidth_gb_s": 10.0, "price_per_hour": 0.1}
            both = {name: numbers(refs[name].digest) for name in ("baseline", "candidate")}
            record: Record = Benchmark(**both, **sizes, samples=found.items, executed_on=machine)  # type: ignore[arg-type]
        else:
            fields = renamed(found.record.model_dump(mode="json"), names)
            fields |= {"executed_on": machine.model_dump(mode="json")} if "executed_on" in fields else {}
            if "champion" in fields:
                fields |= {"champion": refs["champion"].digest, "champion_is_baseline": champion is None}
            record = type(found.record).model_validate(fields)
        parents = {name: refs[name] for name in type(record).parent_types if name in refs}
        with create(artifacts / folder, type(record)) as draft:
            for kind in members:
                if kind.items_file:
                    write_items(draft.folder / kind.items_file, evidence.reports[kind.name].items)
            draft.finish(record, parents=parents)


def write_run(
    artifacts: Path,
    weights: str = "one",
    *,
    against: str | None = None,
    evidence: Evidence | None = None,
    judged_by: Recipe | None = None,
    write_candidate: Callable[..., object] = write_bundle,
) -> Artifact[Verdict]:
    """Every artifact from source to verdict and report, and the verdict. ``against``: digest of the champion.

    ``write_candidate``: called as :func:`write_bundle` is.
    """
    shutil.rmtree(artifacts, ignore_errors=True)
    by = judged_by or recipe()
    fetched = {"model_source": by.model.source, "data_source": by.data.source}
    source = write_stub(artifacts / "source", "Source", "tables", fetched)
    sizes = {"max_positions": by.export.max_positions, "model_positions": by.export.max_positions}
    exported = {**sizes, "max_relative_error": 0.0}
    graph = write_stub(artifacts / "graph", "PortableGraph", "llama", exported, source=source)
    calibration = write_calibration(artifacts / "calibration", graph, ("a" * 64, "b" * 64), by)
    asked = {"asked": decisive(by.plan).model_dump(mode="json")}
    plan = write_stub(artifacts / "plan", "PrecisionPlan", "8 bits", asked, graph=graph, calibration=calibration)
    with create(artifacts / "quantized", QuantizedModel) as draft:
        (draft.folder / "model.safetensors").write_text(weights)
        draft.finish(quantized_model(by), parents={"graph": graph, "calibration": calibration, "plan": plan})
    quantized = load_header(artifacts / "quantized").ref
    write_bundle(artifacts / "baseline", "float", graph=graph)
    write_candidate(artifacts / "candidate", weights, graph=graph, quantized=quantized)
    champion = None if against is None else ArtifactRef("EngineBundle", against)
    write_evidence(artifacts, evidence or good(), champion)
    shutil.copytree(page(), artifacts / "report")
    return judge(artifacts, by)


def judge(artifacts: Path, by: Recipe) -> Artifact[Verdict]:
    """The stage ``gate``."""
    return gate(load_evidence(artifacts, by), by.section(Bounds), artifacts / "verdict")


@cache
def good(kl: float = 0.01) -> Evidence:
    """Evidence that passes; with a ``kl`` of 0.03 it decides nothing, and with more it fails."""
    return make(task_items(600, 2, 2), text_items(60, kl=kl), shadow_items(60), parity_items(41))


def with_items(evidence: Evidence, name: str, items: tuple[Any, ...]) -> Evidence:
    """The evidence with other items in the report of one kind."""
    found: Report[Any, Any] = evidence.reports[name]
    return replace(evidence, reports={**evidence.reports, name: replace(found, items=items)})


@cache
def page() -> Path:
    """A written report; every run has the same. Drawing its charts takes seconds."""
    sources = [*Path(report.__file__).parent.iterdir(), Path(__file__).with_name("report_example.py")]
    made_by = [path.read_text() for path in sorted(sources) if path.is_file()]
    return kept("report", repr(made_by), lambda folder: report.write(example_report(), folder))


def edit_record(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record, and compute its digest anew, as a careful forger would."""
    path = folder / "record.json"
    body = json.loads(path.read_text())
    change(body)
    body.pop("digest")
    path.write_text(json.dumps({"digest": hashlib.sha256(canonical_json(body)).hexdigest(), **body}))


def write_params(path: Path, by: Recipe) -> None:
    path.write_text(yaml.safe_dump(_listed(by.model_dump(by_alias=True)), sort_keys=False))


def _listed(value: Any) -> Any:
    """YAML knows lists, and no tuples."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
