"""Evidence of a bundle at another level of native kernels than the one that was judged.

A bundle carries kernels for several processors over one graph and one set of weights. Levels add floats in another
order, which moves activations to other int8 codes, so their logits are not the same to the bit. The whole evidence is
of one level. Every other level is compared with it: the judged engine's logits are kept with the parity report, the
engine at the other level must agree with them, and with itself in every way it is served. The bounds are the verdict's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from engines.bundle import EngineBundle
from evals.check import Check, Outcome, combine
from evals.items import read_items
from evals.kind import Executed
from evals.kinds.parity import DOCUMENT_CHECK, ParityReport
from evals.kinds.parity.reference_logits import LevelItem
from evals.kinds.serving import (
    DRAFT_TOKENS,
    MAX_RUNNING,
    Draws,
    Pressure,
    ServedItem,
    ServingBounds,
    ServingSettings,
    draw_problems,
    draws_check,
    pressure_check,
    pressure_problems,
    served_checks,
    served_problems,
    size_problems,
)
from evals.kinds.text import TextBounds
from evals.limits import at_least, at_most
from evals.rules import broken, token_rules
from evals.verdict import EXIT_CODES, Verdict
from tapeout.artifact import Artifact, ParentTypes, Record, load
from tapeout.errors import EvidenceError, ExitCode
from tapeout.fingerprint import require_match

LEVEL_ITEMS, SERVED_ITEMS = "level_items.jsonl", "served_items.jsonl"
SPEED = "speed"
SLOTS = 8  # fewer than a server has: each batch size up to here is compared


class LevelVerdict(Executed, Record):
    """What the short evidence of one level gives. ``executed_on`` names the level."""

    artifact_type: ClassVar[str] = "LevelVerdict"
    remedy: ClassVar[str] = "run `tapeout verify`"
    schema_version: ClassVar[int] = 6
    parent_types: ClassVar[ParentTypes] = {
        "candidate": ("EngineBundle",),
        "verdict": ("Verdict",),
        "parity": ("ParityReport",),
    }

    checks: tuple[Check, ...]
    draws: tuple[Draws, ...]
    pressure: Pressure

    @property
    def outcome(self) -> Outcome:
        """Of quality: no float engine is timed here, so whether this level is faster than one stays open."""
        return combine(check.outcome for check in self.checks if check.name != SPEED)

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.outcome]


def level_checks(
    items: Sequence[LevelItem],
    served: Sequence[ServedItem],
    draws: Sequence[Draws],
    pressure: Pressure,
    bounds: Mapping[str, int | float],
) -> tuple[Check, ...]:
    """``bounds``: of the verdict. :class:`EvidenceError` where there is nothing to judge."""
    if not items or not served or any(not item.tokens for item in (*items, *served)):
        raise EvidenceError("the evidence of the level is empty", expected="documents and served positions")
    if not all(math.isfinite(item.kl_sum) for item in items):
        raise EvidenceError("the evidence of the level has a KL that is no number", expected="finite logits")
    serving = ServingBounds.model_validate({name: bounds[name] for name in ServingBounds.model_fields})
    text = TextBounds.model_validate({name: bounds[name] for name in TextBounds.model_fields})
    tokens = sum(item.tokens for item in items)
    return (
        at_most(
            "level_kl",
            "mean KL, judged level against this one, nats",
            {"all documents": math.fsum(item.kl_sum for item in items) / tokens},
            serving.max_serving_kl,
            "documents",
        ),
        at_most(
            "level_document_kl",
            "mean KL of the worst document, judged level against this one, nats",
            {f"document {item.doc_hash[:12]}": item.kl_sum / item.tokens for item in items},
            text.max_document_kl,
            "documents",
        ),
        at_least(
            "level_top_token",
            "same top token, judged level and this one",
            {"all documents": sum(item.agree for item in items) / tokens},
            serving.min_serving_agreement,
            "documents",
        ),
        *served_checks(served, serving),
        draws_check(draws),
        pressure_check(pressure, serving),
        Check(
            name=SPEED,
            title="speed against the float engine at this level",
            outcome=Outcome.INCONCLUSIVE,
            reason="not measured: `dvc repro` with build.target at this level measures it",
        ),
    )


def level_settings(verdict: Verdict) -> ServingSettings:
    """A level is measured with as many sequences and drafts as the judged one was: a server may run that many."""
    facts, settings = verdict.numbers, ServingSettings()
    return settings.model_copy(
        update={
            "max_running": int(facts.get(MAX_RUNNING, settings.max_running)),
            "draft_tokens": max(1, int(facts.get(DRAFT_TOKENS, settings.draft_tokens))),
        }
    )


def load_level(
    folder: Path, level: str, bundle: Artifact[EngineBundle], verdict: Artifact[Verdict]
) -> Artifact[LevelVerdict]:
    """Read evidence of a level and judge it again.

    :class:`ArtifactError` for files that changed, :class:`EvidenceError` for another bundle, verdict or level, for
    items that are missing, and for checks that the items do not give; :class:`FingerprintError` for other libraries.
    """
    found = load(folder, LevelVerdict)
    found.verify()
    ran, digests = found.record.executed_on, {name: ref.digest for name, ref in found.parents.items()}
    wanted = {
        "candidate": bundle.digest,
        "verdict": verdict.digest,
        "parity": verdict.record.evidence.get(ParityReport.artifact_type),
    }
    items, served = read_items(folder / LEVEL_ITEMS, LevelItem), read_items(folder / SERVED_ITEMS, ServedItem)
    problems = [f"is of another {name}" for name, digest in wanted.items() if digests.get(name) != digest]
    if ran.level != level:
        problems.append(f"is of {ran.level}")
    compared = next((check.n for check in verdict.record.checks if check.name == DOCUMENT_CHECK), None)
    if len(items) != compared:
        problems.append(f"has {len(items)} of the {compared} documents of the parity report")
    problems += broken("document", items, lambda item: item.doc_hash, token_rules(lambda item: item.tokens))
    problems += served_problems("the evidence", served, SLOTS, bundle.record.io.max_tokens)
    settings = level_settings(verdict.record)
    problems += size_problems("the evidence", served, settings.max_running)
    drafts = verdict.record.numbers.get(DRAFT_TOKENS, settings.draft_tokens)  # 0: the engine takes none
    if drafts and not any(item.path == "drafts" for item in served):
        problems.append("has nothing on the path 'drafts'")
    problems += draw_problems("the evidence", found.record.draws, True)
    problems += pressure_problems("the evidence", found.record.pressure)
    if not problems:
        require_match(bundle.record.hardware, ran, f"{folder}: the bundle")
        if (
            level_checks(items, served, found.record.draws, found.record.pressure, verdict.record.bounds)
            != found.record.checks
        ):
            problems.append("has checks that its items do not give")
    if problems:
        raise EvidenceError(
            f"{folder}: {problems[0]}",
            expected=f"the evidence of {level}, as it was taken",
            remedy="run `tapeout verify` again",
        )
    return found
