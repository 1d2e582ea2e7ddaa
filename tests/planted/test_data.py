"""Texts that calibration saw and that would judge: in any script, and in near copies."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from tapeout.errors import SourceError
from tests.corpora import SCRIPTS, article, choose, make_source


@pytest.mark.parametrize("spaces", [True, False], ids=["spaces", "no spaces"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_passages_cut_from_one_article_are_on_one_side_only(script: str, spaces: bool, tmp_path: Path) -> None:
    whole = article(script, 300, 0, spaces=spaces)
    cuts = [whole[:200], whole[120:]]  # eighty signs in common
    others = [article(script, 200, number, spaces=spaces) for number in range(1, 4)]
    source = make_source(tmp_path / "s", {"boolq": {"passage": [*cuts, *others]}})
    for seed in range(8):
        calibration, heldout = choose(source, 2, 2, seed)
        assert not ({*calibration} & {*cuts} and {*heldout} & {*cuts})


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: text.replace(" ", "  \n"),
        lambda text: text.replace(" ", ", "),
        lambda text: f"Copied from elsewhere: {text} (end)",
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: "".join(chr(ord(sign) + 0xFEE0) if "!" <= sign <= "~" else sign for sign in text),  # full width
        lambda text: text[: len(text) // 2],
        lambda text: "".join(sign for sign in unicodedata.normalize("NFD", text) if not unicodedata.combining(sign)),
        "\u3164".join,  # a filler, which counts as a letter and shows nothing
        lambda text: text.encode("ascii", "xmlcharrefreplace").decode(),
        lambda text: json.dumps({"role": "user", "content": text}),
    ],
    ids=[
        "case",
        "white space",
        "punctuation",
        "frame",
        "accents",
        "width",
        "half",
        "no accents",
        "invisible",
        "HTML",
        "JSON",
    ],
)
def test_near_copies_are_on_one_side_only(change: Callable[[str], str], tmp_path: Path) -> None:
    text = (
        "Une journée à l’été passé, où les élèves déçus rêvaient de forêts, d’îles et de châteaux. "
        "Près de la mer Égée, un café très âgé n’offrait à ses hôtes qu’un thé léger."
    )
    source = make_source(tmp_path / "s", {"boolq": {"passage": [text, change(text)]}})
    for seed in range(4):
        with pytest.raises(SourceError, match="1 share a passage with another"):
            choose(source, 1, 1, seed)


def test_a_copy_of_what_many_calibration_texts_are_is_left_out(tmp_path: Path) -> None:
    """More than a quarter of them, so that their passage counts as a header."""
    copies = [f"{article('Latin', 200, 0)} {number}" for number in range(12)]
    source = make_source(tmp_path / "s", {"boolq": {"passage": copies}})
    for seed in range(4):
        with pytest.raises(SourceError, match="4 share a passage with another"):
            choose(source, 8, 1, seed)
