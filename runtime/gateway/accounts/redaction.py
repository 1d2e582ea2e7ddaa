"""Removing personal data and secrets from text before it is written anywhere.

Patterns cannot find everything: names, addresses and what only a context makes personal stay. Deployments add their own
redactors, by the entry point group ``tapeout.redactors`` or by name (``package.module:function``).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, cast

from tapeout.errors import TapeoutError, one_line

Redactor = Callable[[str], str]
GROUP = "tapeout.redactors"

# The bounds keep the search linear in the length of the text.
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_KEYS = (
    re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),  # JSON web tokens
    re.compile(r"(?:AKIA|ASIA)[A-Z0-9]{16}"),
    re.compile(r"AIza[\w-]{35}"),
    re.compile(r"(?i)(?<=bearer )\s*[\w.~+/=-]{8,}"),
    re.compile(r"(?i)(?<![a-z])(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?token)[\"']?\s{0,4}[:=]\s{0,4}\S+"),
)  # fmt: skip
# Only with a digit and a letter, as random text of this length has them.
_RANDOM = (
    re.compile(
        r"(?<![A-Za-z0-9])(?:sk|pk|rk|tk|hf|gh[oprsu]|github_pat|glpat|npm|pypi|xox[abprs])[-_][A-Za-z0-9_-]{16,}"
    ),
    re.compile(r"[A-Za-z0-9_-]{32,}"),
)
_EMAIL = re.compile(r"[^\s@<>\"'(),:;\[\]{}]{1,64}@[^\s@<>\"'(),:;\[\]{}]{1,253}\.[^\W\d_]{2,24}")
_DIGITS = re.compile(r"\d(?:[\s.\u2010-\u2015-]{0,2}\d){12,}")
_PHONE = re.compile(r"(?<![\w.])(?:\+|00)?[\s(]{0,2}\d(?:[\s()./\u2010-\u2015-]{0,3}\d){7,14}(?!\d)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d\d[./]\d\d[./]\d{4}")


def redact(text: str) -> str:
    """E-mail addresses, phone numbers, payment cards and keys become words in brackets.

    >>> redact("Write to ann@example.org or +44 20 7946 0958, card 4111 1111 1111 1111, key sk-4f9a8b7c6d5e4f3a2b1c.")
    'Write to [email] or [phone], card [card], key [key].'
    >>> redact("On 2026-11-22 we sold 12345678 units.")
    'On 2026-11-22 we sold 12345678 units.'
    """
    text = _PRIVATE_KEY.sub("[key]", text)
    text = _EMAIL.sub("[email]", text)
    for pattern in _KEYS:
        text = pattern.sub("[key]", text)
    for pattern in _RANDOM:
        text = pattern.sub(lambda found: "[key]" if _is_random(found[0]) else found[0], text)
    text = _DIGITS.sub(lambda found: "[card]" if _has_card(found[0]) else found[0], text)
    return _PHONE.sub(lambda found: "[phone]" if _is_phone(found[0]) else found[0], text)


def _is_random(text: str) -> bool:
    return any(letter.isdecimal() for letter in text) and any(letter.isalpha() for letter in text[3:])


def _has_card(text: str) -> bool:
    """13 to 19 of the digits in a row pass the Luhn check."""
    digits = [int(letter) for letter in text if letter.isdecimal()]
    ends = range(13, len(digits) + 1)
    return any(_luhn(digits[end - size : end]) for end in ends for size in range(13, min(end, 19) + 1))


def _luhn(digits: Sequence[int]) -> bool:
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _is_phone(text: str) -> bool:
    digits = sum(letter.isdecimal() for letter in text)
    if text.startswith(("+", "00")):
        return digits >= 8
    return digits >= 9 and _DATE.match(text.strip()) is None


def redact_all(value: Any, redactors: Sequence[Redactor]) -> Any:
    """Every text in a JSON value."""
    match value:
        case str():
            for redactor in redactors:
                value = redactor(value)
            return value
        case dict():
            entries = cast("dict[str, Any]", value)
            return {redact_all(key, redactors): redact_all(item, redactors) for key, item in entries.items()}
        case list() | tuple():
            return [redact_all(item, redactors) for item in cast("Sequence[Any]", value)]
        case _:
            return value


def find_redactors(names: Sequence[str] = ()) -> list[Redactor]:
    """The patterns above, those of installed packages, and those that are named."""
    found: list[Redactor] = [redact]
    try:
        found += [entry.load() for entry in entry_points(group=GROUP)]
        for name in names:
            module, _, function = name.partition(":")
            found.append(getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise TapeoutError(
            f"a redactor cannot be loaded: {one_line(error)}",
            expected="package.module:function, which takes and returns a text",
            remedy="correct the name, or install the package",
        ) from error
    if wrong := [redactor for redactor in found if not callable(redactor)]:
        raise TapeoutError(f"{wrong[0]!r} is no redactor", expected="a function that takes and returns a text")
    return found
