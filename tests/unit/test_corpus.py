"""Corpora: short names, disjoint rows, stable choice. The tables are real Arrow tables in the layout of the wheel."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.sources.corpus import calibration_and_heldout, chat_prompts, read_split
from pipeline.sources.source import FOLDERS, Source
from tapeout.artifact import Artifact, create, load
from tapeout.errors import SourceError


def make_source(folder: Path, tables: dict[str, dict[str, list[Any]]]) -> Artifact[Source]:
    """A Source whose data sets are ``{name: columns}``."""
    from datasets import Dataset

    with create(folder, Source) as draft:
        for name, columns in tables.items():
            Dataset.from_dict(columns).save_to_disk(draft.folder / "data" / FOLDERS.get(name, name) / "validation")
        (draft.folder / "model").mkdir()
        record = Source(
            model_source="file:x",
            model_sha256=None,
            model_revision=None,
            model_kind="gguf",
            model_entry="model/x",
            model_licenses=(),
            data_source="file:y",
            data_sha256=None,
            data_revision=None,
            data_entry="data",
            data_licenses=(),
            datasets=tuple(sorted(FOLDERS.get(name, name) for name in tables)),
        )
        draft.finish(record, parents={})
    return load(folder, Source)


def passage(number: int) -> str:
    """Forty words that no other number's passage has."""
    return " ".join(f"word{number}x{position}" for position in range(40))


@pytest.fixture
def source(tmp_path: Path) -> Artifact[Source]:
    passages = [passage(i) for i in range(50)]
    return make_source(
        tmp_path / "source",
        {
            "boolq": {"question": ["q"] * 100, "passage": passages + passages, "answer": [True] * 100},  # each twice
            "nq_open": {"question": [f"nq {i}" for i in range(20)] + ["shared"]},
            "trivia_qa": {"question": [" Trivia? "] * 3 + ["shared", "Other?"]},
            "mine/own": {"question": ["hello"]},
        },
    )


def test_short_names_and_folders_read_the_same_table(source: Artifact[Source]) -> None:
    assert read_split(source, "boolq").num_rows == 100
    assert read_split(source, "boolq/none")["passage"][:] == read_split(source, "boolq")["passage"][:]
    assert read_split(source, "mine/own")["question"][:] == ["hello"]


def test_an_absent_data_set_or_split_says_what_there_is(source: Artifact[Source]) -> None:
    with pytest.raises(SourceError, match="piqa") as caught:
        read_split(source, "piqa")
    assert "boolq, mine/own, nq_open, trivia_qa" in caught.value.expected
    with pytest.raises(SourceError, match="no train split") as caught:
        read_split(source, "boolq", "train")
    assert "validation" in caught.value.expected


def test_repeated_passages_count_once(source: Artifact[Source]) -> None:
    calibration, heldout = calibration_and_heldout(source, "boolq", "passage", samples=30, heldout=20, seed=0)
    assert sorted(calibration + heldout) == sorted(passage(i) for i in range(50))
    with pytest.raises(SourceError, match="50 different texts") as caught:
        calibration_and_heldout(source, "boolq", "passage", samples=30, heldout=21, seed=0)
    assert "calibrate.samples" in caught.value.remedy


def test_the_choice_depends_on_the_seed_alone(source: Artifact[Source]) -> None:
    def choose(rows: int, heldout: int, seed: int) -> tuple[list[str], list[str]]:
        return calibration_and_heldout(source, "boolq", "passage", rows, heldout, seed)

    assert choose(10, 5, 1) == choose(10, 5, 1)
    assert choose(10, 5, 1) != choose(10, 5, 2)
    assert choose(20, 5, 1)[1] == choose(10, 5, 1)[1]  # more calibration rows: the same passages judge
    assert choose(10, 8, 1)[0] == choose(10, 5, 1)[0]


def test_short_texts_and_wrong_columns_are_refused(source: Artifact[Source]) -> None:
    with pytest.raises(SourceError, match="0 different texts"):
        calibration_and_heldout(source, "boolq", "question", samples=1, heldout=0, seed=0)
    with pytest.raises(SourceError, match="no column 'text'") as caught:
        calibration_and_heldout(source, "boolq", "text", samples=1, heldout=0, seed=0)
    assert "passage" in caught.value.expected
    with pytest.raises(SourceError, match="holds bool"):
        calibration_and_heldout(source, "boolq", "answer", samples=1, heldout=0, seed=0)


def test_a_passage_cut_from_a_calibration_article_does_not_judge(tmp_path: Path) -> None:
    article = passage(0).split()
    cuts = [" ".join(article[:30]), " ".join(article[10:]).upper()]  # twenty words in common
    source = make_source(tmp_path / "s", {"boolq": {"passage": [*cuts, passage(1)]}})
    for seed in range(12):
        calibration, heldout = calibration_and_heldout(source, "boolq", "passage", 1, 1, seed, min_chars=1)
        assert not (calibration[0] in cuts and heldout[0] in cuts)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(st.text(string.ascii_letters + " \n", max_size=24), min_size=1, max_size=30),  # no partial overlaps
    rows=st.integers(1, 12),
    heldout=st.integers(0, 12),
    seed=st.integers(0, 5),
    min_chars=st.integers(0, 10),
)
def test_the_two_lists_never_meet(texts: list[str], rows: int, heldout: int, seed: int, min_chars: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(Path(folder) / "s", {"boolq": {"passage": texts}})
        try:
            calibration, judged = calibration_and_heldout(source, "boolq", "passage", rows, heldout, seed, min_chars)
        except SourceError:
            different = {tuple(text.lower().split()) for text in texts if len(text.strip()) >= max(1, min_chars)}
            assert len(different) < rows + heldout
            return
    assert (len(calibration), len(judged)) == (rows, heldout)
    chosen = calibration + judged
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {text.strip() for text in texts}
    assert all(len(text) >= min_chars for text in chosen)


def test_prompts_are_different_and_taken_in_turn(source: Artifact[Source]) -> None:
    prompts = chat_prompts(source, ["nq_open", "trivia_qa"], count=6, seed=0)
    assert prompts == chat_prompts(source, ["nq_open", "trivia_qa"], count=6, seed=0)
    assert prompts != chat_prompts(source, ["nq_open", "trivia_qa"], count=6, seed=1)
    everything = chat_prompts(source, ["nq_open", "trivia_qa"], count=23, seed=0)
    assert set(everything) == {*(f"nq {i}" for i in range(20)), "shared", "Trivia?", "Other?"}
    assert sum(p in {"shared", "Trivia?", "Other?"} for p in everything[:6]) >= 3
    with pytest.raises(SourceError, match="23 different questions"):
        chat_prompts(source, ["nq_open", "trivia_qa"], count=24, seed=0)
    with pytest.raises(SourceError, match="no data set"):
        chat_prompts(source, [], count=1, seed=0)
