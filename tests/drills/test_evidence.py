"""Repetition, the share of an answer that it has said before, becomes a kind of evidence."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.drills.checkout import Checkout

KIND = '''"""Repetition: the share of an answer's tokens that stand in it before. A damaged engine falls into loops."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from evals.check import Findings
from evals.kind import Bounds, Evidence, EvidenceKind, EvidenceRecord, Report
from evals.rules import Rule, broken, counted
from tapeout.artifact import Frozen, ParentTypes


class RepetitionItem(Frozen):
    prompt_hash: str
    tokens: int
    repeated: int


class RepetitionReport(EvidenceRecord):
    artifact_type: ClassVar[str] = "RepetitionReport"
    remedy: ClassVar[str] = "run `dvc repro repetition`"
    parent_types: ClassVar[ParentTypes] = {"candidate": ("EngineBundle",), "source": ("Source",)}

    candidate: str
    prompts: int


class RepetitionBounds(Bounds):
    max_repetition: float = Field(default=0.9, ge=0, le=1)


class RepetitionKind(EvidenceKind[RepetitionReport, RepetitionItem, RepetitionBounds]):
    order, name, folder, stage = 55, "repetition", "repetition", "repetition"
    measure_module = "evals.kinds.repetition.measure"
    artifact_types, items_file = ("RepetitionReport",), "repetition_items.jsonl"
    report, item, bounds = RepetitionReport, RepetitionItem, RepetitionBounds

    def problems(self, report: Report[RepetitionReport, RepetitionItem], evidence: Evidence) -> list[str]:
        return [
            *counted("RepetitionReport", "prompts", len(report.items), report.record.prompts),
            *broken("answer", report.items, lambda item: item.prompt_hash, RULES, key="prompt"),
        ]

    def judge(
        self, report: Report[RepetitionReport, RepetitionItem], evidence: Evidence, bounds: RepetitionBounds
    ) -> Findings:
        from evals.conditions import Condition
        from evals.statistics import bounded_mean

        title, most = "share of an answer that it has said before", bounds.max_repetition
        condition = Condition("repetition", title, "at_most", most, "answers", 1, bounds.confidence)
        shares = [item.repeated / item.tokens for item in report.items]
        return Findings((condition.check(bounded_mean(shares, 0, 1, bounds.confidence)),))


RULES: tuple[Rule[RepetitionItem], ...] = (
    ("repeat more than they say", lambda item: not 0 <= item.repeated < item.tokens),
)
KIND = RepetitionKind()
'''
MEASURE = '''"""Stage ``repetition``: greedy answers of the candidate to chat prompts, by the core that serves."""

from __future__ import annotations

from pathlib import Path

from evals.answers import greedy
from evals.kind import Context
from evals.kinds.repetition import KIND, RepetitionItem, RepetitionReport
from evals.kinds.shadow import ShadowSettings
from evals.text import token_hash


def measure(context: Context, folder: Path) -> None:
    settings, source, bundle = context.section(ShadowSettings), context.source(), context.bundle("candidate")
    prompts = context.chat_prompts(settings.datasets, settings.prompts)
    engine = context.engine("candidate")
    answers = greedy(
        context.answerer(engine.engine),
        prompts,
        max_new_tokens=settings.max_new_tokens,
        stop_tokens=bundle.record.stop_tokens,
        progress="answers",
    )
    items = [
        RepetitionItem(
            prompt_hash=token_hash(prompt),
            tokens=len(answer.tokens),
            repeated=len(answer.tokens) - len(set(answer.tokens)),
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    record = RepetitionReport(candidate=engine.digest, prompts=len(items), executed_on=context.executed_on())
    KIND.write(folder, record, parents={"candidate": bundle, "source": source}, items=items)
'''
STAGE = """  repetition:
    desc: How much the candidate's answers repeat themselves.
    cmd: tapeout stage repetition
    params: [shadow, seed, build.threads, build.slots]
    deps: [artifacts/source, artifacts/candidate, artifacts/environment/libraries.json,
           artifacts/environment/code/repetition.json]
    outs: [artifacts/repetition]

"""
MOST_EDITED = 3
TESTS = ("extending", "docs", "recipe", "stages")  # unit tests of what was edited


def test_a_kind_of_evidence(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("evals/kinds/repetition/__init__.py", KIND)
    checkout.add("evals/kinds/repetition/measure.py", MEASURE)
    checkout.edit(
        "params.yaml", "  max_early_divergence: 0.3\n", "  max_early_divergence: 0.3\n  max_repetition: 0.9\n"
    )
    row = "| `gate.max_repetition` | 0 to 1 | 0.9 | mean share of an answer's tokens that stand in it before |\n"
    before = next(line for line in (checkout.folder / "docs/recipes.md").open() if "`gate.max_serving_kl`" in line)
    checkout.edit("docs/recipes.md", before, row + before)
    checkout.edit("dvc.yaml", "  serving:\n    desc: ", f"{STAGE}  serving:\n    desc: ")
    for users in re.findall(r"^ +artifacts/serving, .*$", (checkout.folder / "dvc.yaml").read_text(), re.MULTILINE):
        checkout.edit(
            "dvc.yaml", users, users.replace("artifacts/serving,", "artifacts/serving, artifacts/repetition,")
        )
    assert len(checkout.edited) <= MOST_EDITED, checkout.edited
    checkout.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/unit/test_{name}.py" for name in TESTS))

    project = tmp_path / "project"
    found = checkout.stages(project, {})
    assert found["checks"]["repetition"] == "PASS", found
    recipe = yaml.safe_load((project / "params.yaml").read_text())
    recipe["gate"]["max_repetition"] = 0.0
    (project / "params.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    planted = checkout.stages(project, {}, only=["gate"])
    assert planted["checks"] == {**found["checks"], "repetition": "FAIL"} and planted["outcome"] == "FAIL"
