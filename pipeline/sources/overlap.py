"""Whether texts share a passage, in any script: by runs of letters, so that no spaces between words are needed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Texts that share a run this long count as the same. Brown et al. 2020 (GPT-3), appendix C, takes 13 words: 61 letters
# in the median of BoolQ, where runs of 50 letters find every text that 13 words find, and 5 more (13 of 2,810).
RUN_LETTERS = 50
COMMON, FEW = 0.25, 4
LETTERS_PER_IDEOGRAPH = 3  # a word of Chinese or Japanese has one to three, one of English four to five letters
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))

Hashes, Places = NDArray[np.uint64], NDArray[np.int64]


class Passages:
    """The runs of letters of some texts. Case, width, accents' encoding, spaces and punctuation do not count.

    What more than ``COMMON`` of the texts have, and ``FEW`` at least, is left out: a system prompt or a header is in
    every text of its source, and says nothing of two of them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        found = [runs(text) for text in texts]
        each = [np.unique(one.hashes) for one in found]
        hashes, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *each]), return_counts=True)
        common = hashes[counts > max(FEW - 1, COMMON * len(found))]
        self._known: Hashes = np.unique(
            np.concatenate([np.zeros(0, np.uint64), *(one.beside(common) for one in found)])
        )

    def shared_with(self, text: str) -> bool:
        """Whether ``text`` has a run of one of the texts. Shorter texts must be equal to one."""
        return bool(np.isin(runs(text).hashes, self._known).any())


def letters(text: str) -> str:
    """Letters and digits of a text, in lower case and in one encoding. Symbols count too: Braille has nothing else.

    >>> letters("Ｃafe\\u0301,  1990 – naïve")
    'café1990naïve'
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(letter for letter in folded if letter.isalnum() or unicodedata.category(letter) == "So")


class Runs(NamedTuple):
    """Of each run: its hash, and the letters ``first`` to ``end`` of the text that it has."""

    hashes: Hashes
    first: Places
    end: Places

    def beside(self, common: Hashes) -> Hashes:
        """Hashes of the runs that share no letter with one of the ``common`` ones."""
        is_common = np.isin(self.hashes, common)
        if not is_common.any():
            return self.hashes
        edges = np.zeros(self.end.max() + 2, np.int64)
        np.add.at(edges, self.first[is_common], 1)
        np.add.at(edges, self.end[is_common], -1)
        covered = np.concatenate([[0], np.cumsum(np.cumsum(edges) > 0)])  # letters before each place
        return self.hashes[covered[self.end] == covered[self.first]]


def runs(text: str) -> Runs:
    """The run that begins at each letter, up to where ``RUN_LETTERS`` are full; a short text is one run.

    Where a run ends depends on its own letters alone, so a passage gives the same runs in any text.
    """
    codes = np.frombuffer(letters(text).encode("utf-32-le"), np.uint32).astype(np.uint64)
    if not len(codes):
        return Runs(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        powers = np.cumprod(np.full(len(codes), _FACTOR))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(codes) * powers)])
        weights = np.cumsum(np.concatenate([[0], np.where(_is_ideograph(codes), LETTERS_PER_IDEOGRAPH, 1)]))
        first = np.arange(len(codes))
        end = np.searchsorted(weights, weights[:-1] + RUN_LETTERS)
        whole = end <= len(codes)
        if not whole.any():
            alone = _mixed(sums[-1:] + np.uint64(len(codes)))  # no part of a longer text has this hash
            return Runs(alone, np.zeros(1, np.int64), np.array([len(codes)]))
        shifts = np.cumprod(np.full(len(codes), _INVERSE))
        first, end = first[whole], end[whole]
        return Runs((sums[end] - sums[first]) * shifts[first], first, end)


def _mixed(values: Hashes) -> Hashes:
    """Spread over 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _is_ideograph(codes: Hashes) -> NDArray[np.bool_]:
    """Han, kana and Hangul syllables: each says as much as a few letters."""
    ranges = (
        (0x3040, 0x30FF),
        (0x3400, 0x4DBF),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0xF900, 0xFAFF),
        (0x20000, 0x3FFFF),
    )
    return np.any([(codes >= first) & (codes <= last) for first, last in ranges], axis=0)
