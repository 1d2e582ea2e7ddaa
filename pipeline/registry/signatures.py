"""Which keys are trusted and used for signing, and whether the signatures of a version are by them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.artifact import Artifact
from tapeout.errors import SignatureError
from tapeout.signing import (
    PRIVATE_KEY,
    PUBLIC_KEY,
    ModelStatement,
    Statement,
    key_from_environment,
    model_statement,
    require_about,
    require_same,
    verify_signature,
)

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def public_key(recipe: Recipe) -> Path | None:
    """The key that verdicts must be signed with: of ``TAPEOUT_PUBLIC_KEY``, or else of the recipe."""
    named = recipe.register_.public_key
    return key_from_environment(PUBLIC_KEY) or (Path(named) if named else None)


def private_key(recipe: Recipe) -> Path | None:
    """The key to sign with: of ``TAPEOUT_PRIVATE_KEY``, or else of the recipe."""
    named = recipe.register_.private_key
    return key_from_environment(PRIVATE_KEY) or (Path(named) if named else None)


def require_key(key: Path | None) -> None:
    if key is None:
        raise SignatureError(
            "a signature is required, but no public key is given",
            expected="the key of whoever judges",
            remedy=f"name it with --public-key or {PUBLIC_KEY}",
        )


def require_verdict_signature(
    path: Path, key: Path, name: str, verdict: Mapping[str, Any], digest: str, bundle: Path
) -> None:
    """:class:`SignatureError` unless ``path`` holds a statement, signed with ``key``, about this verdict and bundle.

    ``verdict``: its record, as JSON has it; ``digest``: its digest; ``name``: of the registered model.
    """
    found = verify_signature(path, key, Statement)
    require_about(found, bundle, verdict["candidate"], path)
    expected = {
        "model": name,
        "verdict": digest,
        "evidence": verdict.get("evidence"),
        "outcome": verdict.get("outcome"),
        "executed_on": verdict.get("executed_on"),
        "result": "PASSED" if verdict.get("outcome") == "PASS" else "FAILED",
    }
    require_same(found.predicate.model_dump(mode="json"), expected, path)


def require_model_signature(path: Path, key: Path, bundle: Artifact[Any]) -> None:
    """:class:`SignatureError` unless ``path`` holds the list of this bundle's files, signed with ``key``."""
    if verify_signature(path, key, ModelStatement) != model_statement(bundle):
        raise SignatureError(
            f"the signature of the files is about another bundle than {bundle.digest[:12]}",
            expected="the files that were signed",
            remedy="register the bundle again, with the private key",
        )
