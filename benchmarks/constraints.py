"""Measure how many JSON schemas a server enforces, and what the masks cost.

python -m benchmarks.constraints maskbench_sample.jsonl --tokenizer artifacts/candidate/tokenizer.json

Each line of the file is an object: ``name``, ``schema`` and ``tests``, a list of instances (``data``), ``valid``
or not. A schema goes through the check of a server. Each instance is then followed token by token as a response is,
written in three ways: on one line, with an indent, and without white space.

A schema is right if all its valid instances are accepted and no invalid one is. An instance is ended in the middle if
a mask fails that came after the first token. Times of masks are processor time, so that other work on the machine does
not count. Ends with exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from runtime.constraints.check import ConstraintChecker
from runtime.constraints.compiler import ConstraintCompiler, Matcher
from runtime.wire.messages import Constraint
from tapeout.errors import ExitCode, RequestError, one_line

RIGHT_BAR = 0.91  # share of schemas
MASK_P99_BAR_MS, MASK_WORST_BAR_MS = 1.0, 10.0

Outcome = Literal["accepted", "not accepted", "ended"]


@dataclass
class Result:
    """Of one schema. ``wrong``: what was found with each instance that did not come out as it should."""

    name: str
    refused: str = ""
    wrong: list[str] = field(default_factory=list[str])
    compile_seconds: float = 0.0
    mask_seconds: list[float] = field(default_factory=list[float])

    @property
    def right(self) -> bool:
        return not self.refused and not self.wrong


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, help="by default that of the tokenizer")
    parser.add_argument("--stop-token", type=int, default=0)
    parser.add_argument("--names", action="store_true", help="also print each schema that is not right, and why")
    return parser.parse_args(words)


class Bench:
    def __init__(self, tokenizer: Path, vocab_size: int | None, stop_token: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        size = vocab_size or self._tokenizer.get_vocab_size()
        self._stop = stop_token
        self._checker = ConstraintChecker(tokenizer, size, [stop_token])
        self._compiler = ConstraintCompiler(tokenizer.read_text(encoding="utf-8"), size, [stop_token])
        self._compiler.load()

    def close(self) -> None:
        self._checker.close()

    def measure(self, case: dict[str, Any]) -> Result:
        result = Result(case["name"])
        constraint = Constraint("json_schema", json.dumps(case["schema"]))
        try:
            self._checker.check(constraint)
            start = time.thread_time()
            self._compiler.compile(constraint)
            result.compile_seconds = time.thread_time() - start
        except RequestError as error:
            result.refused = error.found
            return result
        for test in case["tests"]:
            followed = [self._follow(constraint, tokens, result.mask_seconds) for tokens in self._written(test["data"])]
            expected = "accepted" if test["valid"] else "not accepted"
            remark = next((remark for outcome, remark in followed if outcome != expected), None)
            if remark is not None:
                result.wrong.append(f"{'valid' if test['valid'] else 'invalid'} instance {remark}")
        return result

    def _written(self, instance: Any) -> Iterator[list[int]]:
        layouts: tuple[dict[str, Any], ...] = ({}, {"indent": 2}, {"separators": (",", ":")})
        for layout in layouts:
            text = json.dumps(instance, ensure_ascii=False, **layout)
            yield self._tokenizer.encode(text, add_special_tokens=False).ids

    def _follow(self, constraint: Constraint, tokens: Sequence[int], seconds: list[float]) -> tuple[Outcome, str]:
        """What became of the response, and the same with where it happened."""
        matcher: Matcher = self._compiler.compile(constraint)
        said = ""
        for token in tokens:
            start = time.thread_time()
            mask = matcher.mask([self._stop])
            seconds.append(time.thread_time() - start)
            if matcher.error:
                return "ended", f"ended: {matcher.error}"
            piece = self._tokenizer.decode([token])
            if not _allows(mask, token):
                return "not accepted", f"not accepted: after {said[-60:]!r} comes {piece!r}"
            said += piece
            matcher.advance(token)
        if matcher.error:
            return "ended", f"ended: {matcher.error}"
        accepted = _allows(matcher.mask([self._stop]), self._stop)
        return ("accepted", "accepted") if accepted else ("not accepted", f"not accepted: incomplete {said[-60:]!r}")


def _allows(mask: np.ndarray[Any, Any], token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def reason_of(message: str) -> str:
    """A refusal without what is particular to one schema, so that equal reasons can be counted.

    >>> reason_of('the constraint cannot be compiled: Unimplemented keys: ["not"]')
    'Unimplemented keys: ["not"]'
    """
    message = message.removeprefix("the constraint cannot be compiled: ")
    return re.sub(r"/.*/|'.*'|\d+", "…", message)[:100]


def cases(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def run(options: argparse.Namespace) -> int:
    bench = Bench(options.tokenizer, options.vocab_size, options.stop_token)
    try:
        results = [bench.measure(case) for case in cases(options.schemas)]
    finally:
        bench.close()
    return report(results, names=options.names)


def report(results: Sequence[Result], *, names: bool) -> int:
    total, right = len(results), sum(result.right for result in results)
    refused = [result for result in results if result.refused]
    wrong = [line for result in results for line in result.wrong]
    invalid = sum(line.startswith("invalid instance accepted") for line in wrong)
    ended = sum(" instance ended" in line for line in wrong)
    masks = 1e3 * np.array([seconds for result in results for seconds in result.mask_seconds] or [0.0])
    compiled = 1e3 * np.array([result.compile_seconds for result in results if not result.refused] or [0.0])
    print("| of | what | figure | bar |")
    print("|---|---|--:|--:|")
    print(f"| {total} schemas | right | {right / total:.1%} | {RIGHT_BAR:.0%} |")
    print(f"| | refused before the first token | {len(refused) / total:.1%} | |")
    print(f"| instances | invalid, accepted | {invalid} | 0 |")
    print(f"| | valid, not accepted | {sum(line.startswith('valid instance not') for line in wrong)} | |")
    print(f"| | ended in the middle | {ended} | 0 |")
    p99, worst = float(np.percentile(masks, 99)), float(masks.max())
    print(f"| {len(masks)} masks | median | {np.median(masks):.3f} ms | |")
    print(f"| | P99 | {p99:.2f} ms | {MASK_P99_BAR_MS:g} ms |")
    print(f"| | worst | {worst:.1f} ms | {MASK_WORST_BAR_MS:g} ms |")
    print(f"| {len(compiled)} compilations | median | {np.median(compiled):.1f} ms | |")
    print(f"| | worst | {compiled.max():.0f} ms | |")
    print("\n| refused, because | schemas |\n|---|--:|")
    for reason, count in Counter(reason_of(result.refused) for result in refused).most_common():
        print(f"| {one_line(ValueError(reason)).replace('|', '¦')} | {count} |")
    if names:
        for result in results:
            for line in [f"refused: {result.refused}"] * bool(result.refused) + result.wrong:
                print(f"{result.name}: {line}")
    missed = right / total < RIGHT_BAR or invalid or ended or p99 > MASK_P99_BAR_MS or worst > MASK_WORST_BAR_MS
    return ExitCode.GATE_FAILED if missed else ExitCode.PASS


if __name__ == "__main__":
    sys.exit(run(arguments()))
