"""What a fleet costs and how soon it acts, measured with real processes; what docs/benchmarks/fleet-streaming.md shows.

python -m benchmarks.fleet.streaming artifacts/candidate --json docs/benchmarks/fleet-streaming.json \\
    --page docs/benchmarks/fleet-streaming.md
python -m benchmarks.fleet.streaming artifacts/candidate --quick      # whether it runs; its figures mean nothing
python -m benchmarks.fleet.streaming artifacts/candidate --postgres postgresql+psycopg://tapeout@db/tapeout

Measured are processor time and transit of a token (:mod:`benchmarks.fleet.token_cost`), the gap in a stream whose
engine is killed or stands still (:mod:`benchmarks.fleet.gaps`), the time to the first token of another engine
(:mod:`benchmarks.fleet.new_engine`), and admission (:mod:`benchmarks.fleet.admission`). It takes some minutes on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks.fleet import admission
from benchmarks.fleet.admission import admission_costs
from benchmarks.fleet.gaps import BAR_KILL_SECONDS, BAR_STOP_SECONDS, NEW, PROMPT, STREAMS, Gaps, gaps
from benchmarks.fleet.new_engine import BARS_SECONDS, CLIENTS, PLACES, FirstToken, Kind, first_tokens
from benchmarks.fleet.page import Bar, bar_table
from benchmarks.fleet.token_cost import BAR_TRANSIT_US, BARS_US, LOCAL, ONE, TWO, added, token_costs
from runtime.simulation.fleet import percentile
from tapeout.errors import ExitCode, TapeoutError


class Effort(NamedTuple):
    """``tokens``: of each stream of tokens that cost nothing. ``admission_seconds``: of a round."""

    rounds: int
    tokens: int
    signals: int
    steps: int
    admission_seconds: float


FULL, QUICK = Effort(5, 300, 10, 3, 2.0), Effort(1, 20, 1, 1, 0.1)


@dataclass(frozen=True)
class Found:
    bundle: str
    processors: int
    effort: Effort
    tokens: Mapping[str, Any]
    gaps: Mapping[str, Gaps]
    new: Mapping[Kind, Sequence[FirstToken]]
    admission: Mapping[str, Any]


def measure(bundle: Path, effort: Effort, postgres: str = "") -> Found:
    _say("tokens of an engine that costs nothing")
    tokens = uvloop.run(token_costs(list(BARS_US), effort.tokens, effort.rounds))
    _say("engines that are killed or stand still")
    interrupted = uvloop.run(gaps(bundle, effort.signals))
    _say("steps of the load")
    new = uvloop.run(first_tokens(bundle, effort.steps))
    _say("admission")
    admitted = admission_costs(effort.admission_seconds, effort.rounds, postgres)
    return Found(bundle.name, os.cpu_count() or 0, effort, tokens, interrupted, new, admitted)


def bars(found: Found) -> list[Bar]:
    rows = list[Bar]()
    for streams, most in BARS_US.items():
        costs = found.tokens["streams"][str(streams)]
        more = added(costs, ONE, "both")
        what = f"processor time of a token beyond a local engine's, {streams} streams a replica"
        rows.append(Bar(what, f"at most {most:g} µs", f"{more:.2f} µs", more <= most))
        more = added(costs, ONE, "transit_p50")
        what = f"added transit of a token, {streams} streams a replica, medians"
        rows.append(Bar(what, f"at most {BAR_TRANSIT_US / 1e3:g} ms", f"{more / 1e3:.3f} ms", more <= BAR_TRANSIT_US))
    for name, most, seconds, what in (
        ("SIGKILL", BAR_KILL_SECONDS, found.gaps["SIGKILL"].beyond, "gap at SIGKILL beyond computing the prompt again"),
        ("SIGSTOP", BAR_STOP_SECONDS, found.gaps["SIGSTOP"].gaps, "gap at SIGSTOP"),
    ):
        p99 = _at(seconds, 0.99)
        text = f"{1e3 * p99:.0f} ms, P99 of {len(seconds)} streams"
        rows.append(Bar(what, f"P99 at most {1e3 * most:.0f} ms", text, bool(seconds) and p99 <= most))
        one = found.gaps[name]
        text, holds = f"{one.same} of {one.answers}", one.same == one.answers
        rows.append(Bar("the same: answers that are those of one engine", "all", text, holds))
    for kind, most in BARS_SECONDS.items():
        longest = max(one.first_token for one in found.new[kind])
        what = f"step of the load to the first token of another engine, {kind}"
        text = f"{longest:.2f} s, the longest of {len(found.new[kind])}"
        rows.append(Bar(what, f"at most {most:g} s", text, longest <= most))
    ways = found.admission["ways"]
    for name in (admission.SQLITE, admission.POSTGRES):
        if name in ways:
            more = ways[name]["mean"] - ways[admission.ALONE]["mean"]
            text = f"{more:.0f} µs"
            rows.append(Bar(f"added to admission, limits {name}", f"at most {admission.BAR_US:.0f} µs", text,
                            more <= admission.BAR_US))  # fmt: skip
    return rows


def page(found: Found) -> str:
    rows = bars(found)
    return TEMPLATE.format(
        held=sum(row.holds for row in rows),
        all=len(rows),
        bars=bar_table(rows),
        bundle=found.bundle,
        processors=found.processors,
        rounds=found.effort.rounds,
        steps_a_second=round(1 / found.tokens["step_seconds"]),
        tokens=_token_table(found.tokens["streams"]),
        streams=STREAMS,
        prompt=PROMPT,
        new=NEW,
        repeats=found.effort.signals,
        gaps=_gap_table(found.gaps),
        places=PLACES,
        clients=CLIENTS,
        firsts=_first_table(found.new),
        per_second=found.admission["per_second"],
        admission=_admission_table(found.admission["ways"]),
        without="" if admission.POSTGRES in found.admission["ways"] else "PostgreSQL was not there (`--postgres`).\n",
    )


def _token_table(streams: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    lines = [
        "| streams a replica | way | gateway µs | engine µs | both µs, least to most | transit µs P50 | P99 |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for each, costs in streams.items():
        for name in (LOCAL, ONE, TWO):
            cost = costs[name]
            lines.append(
                f"| {each} | {name} | {cost['gateway']:.2f} | {cost['engine']:.2f} "
                f"| {cost['both']:.2f}, {cost['both_least']:.2f} to {cost['both_most']:.2f} "
                f"| {cost['transit_p50']:.0f} | {cost['transit_p99']:.0f} |"
            )
    return "\n".join(lines)


def _gap_table(found: Mapping[str, Gaps]) -> str:
    lines = [
        "| signal | streams | gap ms P50 | P99 | longest | computing again, alone, ms P50 | longest "
        "| all of a signal at once, ms P50 | longest |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, one in found.items():
        cells = [_at(one.gaps, 0.5), _at(one.gaps, 0.99), _at(one.gaps, 1.0)]
        cells += [_at(one.alone, 0.5), _at(one.alone, 1.0), _at(one.together, 0.5), _at(one.together, 1.0)]
        lines.append(f"| {name} | {len(one.gaps)} | " + " | ".join(f"{1e3 * cell:.0f}" for cell in cells) + " |")
    return "\n".join(lines)


def _first_table(found: Mapping[Kind, Sequence[FirstToken]]) -> str:
    lines = [
        "| engine | decided, s | listed, s | first token, s | longest | from the decision, s | open after, s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for kind, steps in found.items():
        decided, listed, first, cold = (
            median(getattr(one, name) for one in steps) for name in ("decided", "listed", "first_token", "cold_seconds")
        )
        own = median(one.first_token - one.decided for one in steps)
        longest = max(one.first_token for one in steps)
        lines.append(
            f"| {kind} | {decided:.2f} | {listed:.2f} | {first:.2f} | {longest:.2f} | {own:.2f} | {cold:.2f} |"
        )
    return "\n".join(lines)


def _admission_table(ways: Mapping[str, Mapping[str, float]]) -> str:
    lines = ["| limits | mean µs | P50 | P99 | processor time µs |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {name} | {cost['mean']:.1f} | {cost['p50']:.1f} | {cost['p99']:.1f} | {cost['processor']:.0f} |"
        for name, cost in ways.items()
    ]
    return "\n".join(lines)


def _at(values: Sequence[float], share: float) -> float:
    return percentile(sorted(values), share) if values else 0.0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--quick", action="store_true", help="once each, and few tokens")
    parser.add_argument("--postgres", default="", help="URL of a PostgreSQL database, to share limits through, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(words)
    try:
        found = measure(options.bundle.resolve(), QUICK if options.quick else FULL, options.postgres)
    except TapeoutError as error:
        print(error, file=sys.stderr)
        return ExitCode.BROKEN
    written = page(found)
    print(written)
    if options.json:
        content = asdict(found) | {"effort": found.effort._asdict()}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.page:
        options.page.write_text(written, encoding="utf-8")
    return ExitCode.PASS


TEMPLATE = """# What a fleet costs, and how soon it acts

This page is written by `python -m benchmarks.fleet.streaming BUNDLE --page docs/benchmarks/fleet-streaming.md`.
Do not edit it.

Real processes and sockets on one machine with {processors} processors, and the client of engines that
`tapeout gateway` has ([docs/fleet.md](../fleet.md)). {held} of {all} bars hold. Engines, gateway and clients share
the processors, so times are longer than on machines of their own.

## Bars

{bars}

## A token

Its way from the engine's scheduler to whoever reads the stream in the gateway, without HTTP. Engines cost nothing:
a step ends {steps_a_second} times a second, and each stream gets a token. The local engine is that of `tapeout
serve`, over a socket pair; those of a fleet listen at TCP, with a key. Medians of {rounds} rounds, in which the
three take turns. A fleet of two has as many streams for each engine, so twice as many for the gateway. The bars
are of the fleet of one, which has the same streams as the local engine.

Processor time is that of the gateway's process and of those of engines, divided by the tokens, from when a tenth of
the tokens have come until nine tenths have: what the beginning and the end of a request cost is not in it. What
a client does beside requests is in it (it watches engines and reads their list), and the time of the streams' reader,
which is the same in all three. Transit is from the end of the engine's step until the
reader has the token. It grows with the streams, whose tokens come in one report and are passed on one after another.

{tokens}

## An engine that is killed, or stands still

Two engines of the bundle "{bundle}" with one thread each; {streams} greedy streams, prompts of {prompt} tokens that
share nothing, answers of {new}, or fewer where an engine has few positions. In the midst of them the engine that has
most of the streams gets a signal. Each signal is sent {repeats} times. A gap is the longest time between
two tokens of an interrupted stream, from the signal on. It has the finding out, the choice of another engine, and
computing prompt and answer so far again there, beside the streams which that one has already.

Computing again alone is the time to the first token of one such prompt on the idle engine that was left. Streams that
were interrupted together are computed again together, so the last of them waits for all; the last two columns are
that time on the idle engine. The bar takes off the time alone.

{gaps}

## Another engine

The loop of `tapeout fleet run` (`scaling`, without Ray), engines of the same bundle with one thread and {places}
places for requests each. One engine idles; then {clients} clients ask at once, each again once it has its answer. All
times are from then. *Decided*: the process of a cold engine is started, or the list that gateways read has the one on
standby. *Listed*: the gateway has connected to it. *First token*: the gateway has one of it. Medians, and the
longest. *Open after*: from the start of an engine's process until it is open, as it has measured.

In the time to the decision are the reports, the second between two decisions and the half second between two looks of
the loop; in what follows, for a cold engine the start of its process, the opening of the bundle and the loop's next
look, and for both up to a second until the gateway reads the list again. Where one was on standby, another engine is
started for its place meanwhile, and takes processors from both.

{firsts}

## Admission

Of a key with limits on requests, tokens and its budget: {per_second} requests a second, one after another, which
reserve tokens and give back the rest; medians of {rounds}, in turns. The time is that until a request is
admitted. Processor time is all that the process uses meanwhile, divided by the requests, with the transactions of
shared limits and with the pauses. {without}
{admission}
"""


if __name__ == "__main__":
    sys.exit(main())
