"""Defects that only steps of some size or kind have, as a server makes them: each is found by steps of that kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engines.bundle import EngineBundle
from engines.protocol import Entry, Result
from engines.sequences import Sequences
from evals.check import Outcome
from evals.kinds.serving import DRAFT_TOKENS, MAX_RUNNING, ServingBounds, ServingSettings, served_checks
from evals.kinds.serving.running_paths import most_running, running_paths
from evals.kinds.serving.served_log import ServedLog, Streams
from evals.statement import statement
from pipeline.cli.serve import require_judged
from pipeline.cli.serve_limits import limits_within, require_covered
from runtime.gateway.http.listen import ServeError
from runtime.wire.limits import Limits
from tapeout import artifact
from tapeout.signing import generate_keys, sign, signature_path, write_signature
from tests import judged
from tests.fake_engine import HistoryEngine

TEXT = [number * number % 31 for number in range(4000)]
SETTINGS = ServingSettings()
MOST = 64
FACTS = {"max_running": MAX_RUNNING, "max_draft_tokens": DRAFT_TOKENS}


class Faulty(HistoryEngine):
    """``wrong``: of the entries of a step and the number of one, whether its logits are those of other tokens."""

    def __init__(self, wrong: Callable[[Sequence[Entry], int], bool]) -> None:
        super().__init__(slots=MOST, max_tokens=128, block_tokens=16)
        self.wrong = wrong

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        return [
            reversed_logits(result) if self.wrong(batch, number) else result
            for number, result in enumerate(super().step(batch))
        ]


def reversed_logits(result: Result) -> Result:
    return result if result.logits is None else result._replace(logits=result.logits[:, ::-1])


class StaleBlocks(HistoryEngine):
    """A sequence that gets blocks of another, in a step of several, finds the other's first token there."""

    def __init__(self) -> None:
        super().__init__(slots=MOST, max_tokens=128, block_tokens=16)

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        stale = [entry.start == 0 and self.held[entry.blocks[0]][0] is not None for entry in batch]
        return super().step(
            [
                entry._replace(tokens=[30 - entry.tokens[0], *entry.tokens[1:]]) if old and len(batch) > 1 else entry
                for entry, old in zip(batch, stale, strict=True)
            ]
        )


def wrong_paths(engine: HistoryEngine) -> set[str]:
    """The paths on which something is wrong; the gate's checks must fail where there is one."""
    log = ServedLog()
    assert most_running(engine.capabilities, SETTINGS) == MOST
    running_paths(Sequences(engine), Streams(TEXT), SETTINGS, log)
    items = log.items()
    found = {item.path for item in items if item.kl_sum > 0}
    outcomes = {check.name: check.outcome for check in served_checks(items, ServingBounds())}
    assert (outcomes["serving_position_kl"] is Outcome.FAIL) == bool(found)
    return found


def rows_from(first: int) -> Callable[[Sequence[Entry], int], bool]:
    return lambda batch, number: number >= first


def test_sound_steps_of_every_size() -> None:
    assert wrong_paths(Faulty(lambda batch, number: False)) == set()


@pytest.mark.parametrize("rows", [17, 33, 48])
def test_rows_behind_so_many_are_wrong(rows: int) -> None:
    assert {"running", "joining", "resumed"} <= wrong_paths(Faulty(rows_from(rows)))


def test_one_batch_size_is_wrong() -> None:
    assert "running" in wrong_paths(Faulty(lambda batch, number: len(batch) == 37 and number == 36))


def test_tokens_beside_a_prompt_are_wrong() -> None:
    def wrong(batch: Sequence[Entry], number: int) -> bool:
        return len(batch[number].tokens) == 1 and any(entry.start == 0 for entry in batch)

    assert wrong_paths(Faulty(wrong)) == {"joining", "resumed"}


def test_tokens_behind_drafts_are_wrong() -> None:
    def wrong(batch: Sequence[Entry], number: int) -> bool:
        entry = batch[number]
        return entry.start > 0 and len(entry.positions or ()) > 1

    assert wrong_paths(Faulty(wrong)) == {"drafts"}


def test_a_resumed_sequence_finds_the_blocks_of_another() -> None:
    assert wrong_paths(StaleBlocks()) == {"resumed"}


@pytest.mark.parametrize(
    ("field", "option"), [("max_running", "--max-running"), ("max_draft_tokens", "--draft-tokens")]
)
def test_limits_beyond_what_was_measured(field: str, option: str, tmp_path: Path) -> None:
    judged.write_run(tmp_path / "artifacts")  # measured with two requests and eight drafts
    facts = require_judged(tmp_path / "artifacts" / "candidate").facts
    assert (facts[MAX_RUNNING], facts[DRAFT_TOKENS]) == (2, 8)
    most = {"max_running": 2, "max_draft_tokens": 8}
    limits = limits_within({}, facts, "here")
    assert (limits.max_running, limits.max_draft_tokens) == (2, 8)
    assert limits_within(most, facts, "here") == limits
    assert getattr(limits_within({field: most[field] - 1}, facts, "here"), field) == most[field] - 1
    with pytest.raises(ServeError, match=f"{option} {most[field] + 1} is more than") as refused:
        limits_within({field: most[field] + 1}, facts, "here")
    assert f"at most {most[field]}" in str(refused.value) and "--unsafe" in str(refused.value)
    assert getattr(limits_within({field: 99}, facts, "here", unsafe=True), field) == 99
    require_covered(limits, facts, "here")
    with pytest.raises(ServeError, match=option):  # a champion that was measured with less
        require_covered(limits, {**facts, FACTS[field]: 1}, "there")
    unknown = {name: value for name, value in facts.items() if name != FACTS[field]}
    with pytest.raises(ServeError, match="does not say with how many"):
        limits_within({}, unknown, "here")
    assert getattr(limits_within({}, unknown, "here", unsafe=True), field) == getattr(Limits(), field)


def test_limits_of_a_signed_bundle_without_its_verdict(tmp_path: Path) -> None:
    """The signature says what was measured, also where a verdict of another run lies beside the bundle."""
    private, public = tmp_path / "t.key", tmp_path / "t.pub"
    generate_keys(private, public)
    verdict = judged.write_run(tmp_path / "artifacts")
    candidate = tmp_path / "artifacts" / "candidate"
    said = statement(judged.NAME, verdict, artifact.load_record(candidate, EngineBundle))
    write_signature(signature_path(candidate), sign(said, private))
    shutil.rmtree(tmp_path / "artifacts" / "verdict")
    facts = require_judged(candidate, public_key=public).facts
    assert (facts[MAX_RUNNING], facts[DRAFT_TOKENS]) == (2, 8)
    with pytest.raises(ServeError, match="--max-running 3 is more than"):
        limits_within({"max_running": 3}, facts, "here")
