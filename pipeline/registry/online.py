"""What live traffic must have shown of a challenger before it is promoted (``online`` in the recipe)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evals.check import Outcome
from evals.kinds.online import Online, OnlineVerdict
from evals.kinds.online.measure import load_judged
from pipeline.registry.versions import get_version
from tapeout.artifact import Artifact
from tapeout.errors import RegistryError
from tapeout.observations import ShadowPlan

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER = "online"  # of the version's run
REMEDY = "serve the champion with --shadow, then `tapeout shadow-verdict`, then promote with --online"


def require_online(settings: Online, folder: Path | None, champion: str, challenger: str) -> None:
    """:class:`RegistryError` unless ``folder`` holds a PASS about these two engines, by bounds no looser than these.

    Without a folder, only if the recipe does not require one. ``champion``, ``challenger``: digests of bundles.
    """
    if folder is None:
        if settings.required:
            raise RegistryError(
                "the recipe requires a PASS on live traffic, and none is given",
                expected=f"an {OnlineVerdict.artifact_type} about challenger {challenger[:12]} beside champion "
                f"{champion[:12]}",
                remedy=REMEDY,
            )
        return
    found = load_judged(folder).record
    for role, digest in (("champion", champion), ("challenger", challenger)):
        if (seen := getattr(found.plan, role)) != digest:
            raise RegistryError(
                f"the online verdict is about {role} {seen[:12]}", expected=f"{role} {digest[:12]}", remedy=REMEDY
            )
    if looser := _looser(found.plan, settings):
        raise RegistryError(
            f"the online verdict was reached by looser bounds than the recipe's: {', '.join(looser)}",
            expected="bounds at least as strict",
            remedy="start a new test with the recipe in force",
        )
    if found.outcome is not Outcome.PASS:
        raise RegistryError(
            f"the challenger was judged {found.outcome.value} on live traffic: {found.reason}",
            expected="a PASS",
            remedy="let the server observe more conversations, or change the recipe",
        )


def log_online(client: MlflowClient, name: str, number: int, verdict: Artifact[OnlineVerdict]) -> None:
    """Keep it in the version's run, beside the evidence of the gate."""
    client.log_artifacts(get_version(client, name, number).run_id or "", str(verdict.folder), FOLDER)


def _looser(plan: ShadowPlan, settings: Online) -> list[str]:
    larger = [name for name in ("max_disagreement", "max_missed") if getattr(plan, name) > getattr(settings, name)]
    return larger + [
        name for name in ("confidence", "min_conversations") if getattr(plan, name) < getattr(settings, name)
    ]
