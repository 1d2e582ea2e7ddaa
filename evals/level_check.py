"""Takes the short evidence of a bundle at one level: ``evals/level.py`` says what it shows. It needs no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from engines.bundle import EngineBundle
from engines.load import load, runs_here
from engines.sequences import Sequences
from evals.items import write_items
from evals.kinds.parity import ParityReport
from evals.kinds.serving import ServingSettings
from evals.level import LEVEL_ITEMS, SERVED_ITEMS, LevelVerdict, level_checks
from evals.reference_logits import REFERENCE_FILE, LevelItem, ReferenceLogits
from evals.serving import served_items
from evals.text import CHUNK_TOKENS
from evals.verdict import Verdict
from tapeout.artifact import Artifact, create
from tapeout.artifact import load as load_artifact
from tapeout.errors import EvidenceError

SLOTS = 8  # fewer than a server has: each batch size up to here is compared


def check_level(
    bundle: Artifact[EngineBundle],
    verdict: Artifact[Verdict],
    parity: Artifact[ParityReport],
    level: str,
    folder: Path,
    *,
    threads: int = 0,
) -> Artifact[LevelVerdict]:
    """Run the bundle at ``level`` and write its LevelVerdict to ``folder``.

    :class:`EvidenceError` where verdict or parity report are about another bundle; :class:`FingerprintError` where
    this machine cannot run that level.
    """
    if (verdict.record.candidate, verdict.record.evidence.get(ParityReport.noun)) != (bundle.digest, parity.digest):
        raise EvidenceError(
            f"verdict {verdict.digest[:12]} is about bundle {verdict.record.candidate[:12]} and another parity report",
            expected=f"the verdict on bundle {bundle.digest[:12]}",
            remedy="run `dvc repro gate`, or name the bundle that was judged",
        )
    if REFERENCE_FILE not in parity.files:
        raise EvidenceError(
            f"{parity.folder} has no {REFERENCE_FILE}",
            expected="the logits of the judged engine",
            remedy="run `dvc repro parity gate register`",
        )
    here = runs_here(bundle, level)
    reference = ReferenceLogits.load(parity.folder / REFERENCE_FILE)
    engine, reopened = (
        Sequences(load(bundle.folder, threads=count, slots=slots, level=level))
        for count, slots in ((threads, SLOTS), (1, SLOTS + 1))
    )
    try:
        items = [_compare(engine, reference, number) for number in tqdm(range(len(reference.documents)), disable=None)]
        text = [token for tokens in reference.documents for token in tokens]
        served = served_items(ServingSettings(), None, engine, reopened, text)
    finally:
        engine.close()
        reopened.close()
    with create(folder, LevelVerdict) as draft:
        write_items(draft.folder / LEVEL_ITEMS, items)
        write_items(draft.folder / SERVED_ITEMS, served)
        draft.finish(
            LevelVerdict(checks=level_checks(items, served, verdict.record.bounds), executed_on=here),
            parents={"candidate": bundle, "verdict": verdict, "parity": parity},
        )
    return load_artifact(folder, LevelVerdict)


def _compare(engine: Sequences, reference: ReferenceLogits, number: int) -> LevelItem:
    tokens = reference.documents[number]
    rows = [
        engine.prefill(
            0, tokens[at : at + CHUNK_TOKENS], start=at, positions=range(len(tokens[at : at + CHUNK_TOKENS]))
        )
        for at in range(0, len(tokens), CHUNK_TOKENS)
    ]
    return reference.compare(number, np.concatenate(rows))
