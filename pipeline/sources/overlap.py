"""Whether texts share a passage, in any script: by runs of letters, so that no spaces between words are needed."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Texts that share a run this long count as the same. Brown et al. 2020 (GPT-3), appendix C, takes 13 words: 61 letters
# in the median of BoolQ, where runs of 50 letters find every text that 13 words find, and 5 more (13 of 2,810).
RUN_LETTERS = 50
COMMON, FEW = 0.25, 4
LEAST_OWN = 10  # letters beside what is common: with fewer, such as a number, a text is a copy of what is common
LETTERS_PER_IDEOGRAPH = 3  # a word of Chinese or Japanese has one to three, one of English four to five letters
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))

# Letters and symbols that show nothing, or stand for nothing: Hangul fillers, a Braille cell without dots, a note
# without a head, what replaces a character or an object, and what makes Arabic and N'Ko words longer.
_BLANK = frozenset("\u115f\u1160\u2800\U0001d159\ufffc\ufffd\u0640\u07fa")
_ESCAPE = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\[nrtbf]")  # of JSON, as in a column of chats

Hashes, Places = NDArray[np.uint64], NDArray[np.int64]


class Passages:
    """The runs of letters of some texts. Case, accents, width, spaces, punctuation and escapes do not count.

    What more than ``COMMON`` of the texts have, and ``FEW`` at least, is left out: a system prompt or a header is in
    every text of its source, and says nothing of two of them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        found = [runs(text) for text in texts]
        each = [np.unique(one.hashes) for one in found]
        hashes, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *each]), return_counts=True)
        self._common: Hashes = hashes[counts > max(FEW - 1, COMMON * len(found))]
        self._known: Hashes = np.unique(
            np.concatenate([np.zeros(0, np.uint64), *(one.beside(self._common) for one in found)])
        )
        self._rests = {one.rest(self._common) for one in found}

    def shared_with(self, text: str) -> bool:
        """Whether ``text`` has a run of one of the texts. A shorter text is shared where it is equal to one.

        What a text has beside common runs is compared as a whole, too; a text that has nearly nothing is shared.
        """
        one = runs(text)
        if np.isin(one.hashes, self._known).any():
            return True
        rest = one.rest(self._common)
        return rest is not None and (_weight(rest) < LEAST_OWN or rest in self._rests)


def letters(text: str) -> str:
    """Letters and digits of a text, in lower case and without accents. Symbols count too: Braille has nothing else.

    Greek drops accents in capitals, and the capital of the Turkish dotless i is that of i. Of a text without letters
    all that is not blank counts.

    >>> letters("Ｃafe\\u0301,  1990 – na&iuml;ve")
    'cafe1990naive'
    """
    plain = _ESCAPE.sub(_unescaped, html.unescape(text))
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", plain).upper().casefold())
    kept = "".join(one for one in folded if one not in _BLANK and unicodedata.category(one) not in ("Mn", "Cf"))
    composed = unicodedata.normalize("NFC", kept)  # syllables of Hangul
    found = "".join(one for one in composed if one.isalnum() or unicodedata.category(one) == "So")
    return found or "".join(composed.split())


def _unescaped(found: re.Match[str]) -> str:
    units = bytes.fromhex(found[0].replace("\\u", "")) if found[0].startswith("\\u") else b"\0 "
    return units.decode("utf-16-be", "ignore")


class Runs(NamedTuple):
    """Of each run: its hash, and which of the text's ``letters`` it has: ``first`` to ``end``."""

    letters: str
    hashes: Hashes
    first: Places
    end: Places

    def beside(self, common: Hashes) -> Hashes:
        """Hashes of the runs that share no letter with one of the ``common`` ones."""
        covered = self._covered(common)
        before = np.concatenate([[0], np.cumsum(covered)])  # covered letters before each place
        return self.hashes[before[self.end] == before[self.first]]

    def rest(self, common: Hashes) -> str | None:
        """The letters that no ``common`` run has; None where the text has no such run."""
        covered = self._covered(common)
        return "".join(np.array([*self.letters])[~covered]) if covered.any() else None

    def _covered(self, common: Hashes) -> NDArray[np.bool_]:
        """Whether each letter is in a ``common`` run."""
        is_common = np.isin(self.hashes, common)
        edges = np.zeros(len(self.letters) + 1, np.int64)
        np.add.at(edges, self.first[is_common], 1)
        np.add.at(edges, self.end[is_common], -1)
        return np.cumsum(edges)[:-1] > 0


def runs(text: str) -> Runs:
    """The run that begins at each letter, up to where ``RUN_LETTERS`` are full; a short text is one run.

    Where a run ends depends on its own letters alone, so a passage gives the same runs in any text.
    """
    found = letters(text)
    codes = _codes(found)
    if not found:
        return Runs(found, np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        powers = np.cumprod(np.full(len(codes), _FACTOR))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(codes) * powers)])
        weights = np.cumsum(np.concatenate([[0], _weights(codes)]))
        first = np.arange(len(codes))
        end = np.searchsorted(weights, weights[:-1] + RUN_LETTERS)
        whole = end <= len(codes)
        if not whole.any():
            alone = _mixed(sums[-1:] + np.uint64(len(codes)))  # no part of a longer text has this hash
            return Runs(found, alone, np.zeros(1, np.int64), np.array([len(codes)]))
        shifts = np.cumprod(np.full(len(codes), _INVERSE))
        first, end = first[whole], end[whole]
        return Runs(found, (sums[end] - sums[first]) * shifts[first], first, end)


def _mixed(values: Hashes) -> Hashes:
    """Spread over 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _codes(found: str) -> Hashes:
    return np.frombuffer(found.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def _weight(found: str) -> int:
    """How many letters say as much."""
    return int(_weights(_codes(found)).sum())


def _weights(codes: Hashes) -> Places:
    return np.where(_is_ideograph(codes), LETTERS_PER_IDEOGRAPH, 1)


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
