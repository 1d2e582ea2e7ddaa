"""Takes the short evidence of a bundle at one level: ``evals/level.py`` says what it shows. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from engines.bundle import BLOCK_TOKENS, EngineBundle
from engines.load import at_level, load, runs_here
from engines.protocol import FloatArray
from engines.sequences import Sequences
from evals.items import write_items
from evals.kinds.parity import ParityReport
from evals.kinds.parity.reference_logits import REFERENCE_FILE, ReferenceLogits
from evals.kinds.serving import ServingSettings, draws_of
from evals.kinds.serving.measure import drawn_logits, served_items
from evals.kinds.serving.pressure import MakeAnswerer, under_pressure
from evals.kinds.serving.running_paths import SPREAD
from evals.kinds.serving.served_log import Streams
from evals.level import LEVEL_ITEMS, SERVED_ITEMS, SLOTS, LevelVerdict, level_checks, level_settings
from evals.text import CHUNK_TOKENS
from evals.verdict import Verdict
from tapeout.artifact import Artifact, create
from tapeout.artifact import load as load_artifact
from tapeout.errors import EvidenceError, RequestError
from tapeout.progress import ProgressBar


def check_level(
    bundle: Artifact[EngineBundle],
    verdict: Artifact[Verdict],
    parity: Artifact[ParityReport],
    level: str,
    folder: Path,
    draw_counts: Callable[[Artifact[EngineBundle], FloatArray], Mapping[str, tuple[int, int]]],
    answerer: MakeAnswerer,
    decode: Callable[[Sequence[int]], str],
    *,
    threads: int = 0,
) -> Artifact[LevelVerdict]:
    """Run the bundle at ``level`` and write its LevelVerdict to ``folder``.

    ``draw_counts``: tokens the bundle draws at that level from ``[P, V]`` logits, and how many numpy does not draw.
    ``answerer``, ``decode``: see :func:`evals.kinds.serving.pressure.under_pressure`; with the kernels of that level.

    :class:`EvidenceError` where verdict or parity report are about another bundle, and where logits are not finite;
    :class:`FingerprintError` where this machine cannot run that level.
    """
    if verdict.record.candidate != bundle.digest:
        raise EvidenceError(
            f"verdict {verdict.digest[:12]} is about bundle {verdict.record.candidate[:12]}",
            expected=f"the verdict on bundle {bundle.digest[:12]}",
            remedy="run `dvc repro gate`, or name the bundle that was judged",
        )
    if verdict.record.evidence.get(ParityReport.artifact_type) != parity.digest:
        raise EvidenceError(
            f"verdict {verdict.digest[:12]} is about another parity report than {parity.digest[:12]}",
            expected="the parity report that was judged",
            remedy="run `dvc repro gate`",
        )
    if REFERENCE_FILE not in parity.files:
        raise EvidenceError(
            f"{parity.folder} has no {REFERENCE_FILE}",
            expected="the logits of the judged engine",
            remedy="run `dvc repro parity gate register`",
        )
    here = runs_here(bundle, level)
    reference = ReferenceLogits.load(parity.folder / REFERENCE_FILE)
    settings, slots = level_settings(verdict.record), _slots(bundle, level_settings(verdict.record))
    with closing(Sequences(load(bundle.folder, threads=threads, slots=slots, level=level))) as engine:
        text = [token for tokens in reference.documents for token in tokens]
        documents = ProgressBar(reference.documents, title="held-out text", unit="document")
        try:
            items = [reference.compare(number, _logits(engine, tokens)) for number, tokens in enumerate(documents)]
            drawn = draws_of(draw_counts(at_level(bundle, level), drawn_logits(engine, text)))
            stops = bundle.record.stop_tokens
            pressure = under_pressure(engine, answerer, decode, Streams(text), settings, stops)
            served = served_items(
                settings,
                None,
                engine,
                lambda: Sequences(load(bundle.folder, threads=1, slots=slots + 1, level=level)),
                text,
            )
        except RequestError as error:  # an engine refuses logits that are not finite
            raise EvidenceError(
                f"at {level} {error.found}",
                expected=error.expected,
                remedy="the kernels of this level are wrong on this processor: serve at another level",
            ) from error
    with create(folder, LevelVerdict) as draft:
        write_items(draft.folder / LEVEL_ITEMS, items)
        write_items(draft.folder / SERVED_ITEMS, served)
        draft.finish(
            LevelVerdict(
                checks=level_checks(items, served, drawn, pressure, verdict.record.bounds),
                draws=drawn,
                pressure=pressure,
                executed_on=here,
            ),
            parents={"candidate": bundle, "verdict": verdict, "parity": parity},
        )
    return load_artifact(folder, LevelVerdict)


def _slots(bundle: Artifact[EngineBundle], settings: ServingSettings) -> int:
    """Enough for as many short sequences to run as are to be measured, and for each batch size that is demanded."""
    longest = bundle.record.io.max_tokens
    each = min(SPREAD + settings.draft_tokens + 1 + BLOCK_TOKENS, longest)  # at most, in whole blocks
    return max(SLOTS, -(-settings.max_running * each // longest))


def _logits(engine: Sequences, tokens: list[int]) -> Iterator[FloatArray]:
    """After each of the tokens, a chunk at a time."""
    for at in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[at : at + CHUNK_TOKENS]
        yield engine.prefill(0, chunk, start=at, positions=range(len(chunk)))
