"""The verdict in the artifacts folder, refused unless the artifacts beside it give it, whole and unchanged."""

from __future__ import annotations

from pathlib import Path

from engines.bundle import EngineBundle
from evals.evidence import LINEAGE, measured, require_reproducible
from evals.policy import policy_of
from evals.statement import statement
from evals.verdict import Verdict
from pipeline.recipe import load_recipe
from pipeline.registry.signatures import public_key, require_verdict_signature
from tapeout.artifact import Artifact, load, load_header, load_record, verify
from tapeout.errors import EvidenceError
from tapeout.signing import sign, signature_path, write_signature

ENGINES = ("baseline", "candidate", "quantized")


def load_verdict(artifacts: Path, params: Path, *, key: Path | None = None) -> Artifact[Verdict]:
    """:class:`EvidenceError` unless the evidence beside the verdict gives it, by the policy of the recipe.

    Every file of the engines, the quantized model and the reports is hashed again. ``key``: sign the verdict with it.
    With a public key (``TAPEOUT_PUBLIC_KEY``, or of the recipe), a verdict that is not signed is refused.
    """
    found = load(artifacts / "verdict", Verdict)
    found.verify()
    recipe = load_recipe(params)
    for name in dict.fromkeys((*ENGINES, *measured())):
        verify(artifacts / name)
    _require_judged(artifacts, found)
    if differences := found.record.policy.differences(policy_of(recipe)):
        raise EvidenceError(
            f"the verdict was judged by another policy than that of {params}: " + "; ".join(differences),
            expected="a verdict by the bounds and settings of the recipe",
            remedy="run `dvc repro gate`",
        )
    require_reproducible(found, artifacts, recipe)
    candidate = artifacts / "candidate"
    if key is not None:
        bundle = load_record(candidate, EngineBundle)
        write_signature(signature_path(candidate), sign(statement(recipe.register_.model_name, found, bundle), key))
    if (trusted := public_key(recipe)) is not None:
        name, record = recipe.register_.model_name, found.record.model_dump(mode="json")
        require_verdict_signature(signature_path(candidate), trusted, name, record, found.digest, candidate)
    return found


def _require_judged(artifacts: Path, verdict: Artifact[Verdict]) -> None:
    """The artifacts are those that the verdict names."""
    judged = {"baseline": verdict.record.baseline, "candidate": verdict.record.candidate}
    for name in dict.fromkeys((*LINEAGE, *measured())):
        header = load_header(artifacts / name)
        wanted = judged.get(name, verdict.record.evidence.get(header.artifact_type))
        if wanted is not None and header.digest != wanted:
            raise EvidenceError(
                f"the verdict judged {name} {wanted[:12]}, but {header.digest[:12]} lies beside it",
                expected="a verdict about these artifacts",
                remedy="run `dvc repro gate`",
            )
