"""What ``tapeout capacity`` can be told. Typer's options are made from these classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """What comes, and how fast."""

    trace: Annotated[
        Path | None,
        typer.Argument(
            help="A trace (.jsonl as Mooncake's, .csv as Azure's) or a folder of `tapeout serve --traffic-log`; "
            "without, conversations are drawn."
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Calls a second of a log, or conversations a second that are drawn."),
    ] = None
    faster: Annotated[float, typer.Option(min=0.001, help="So many times as many requests a second.")] = 1.0
    seconds: Annotated[float | None, typer.Option(min=1, help="Only so many of the trace; drawn: 300.")] = None
    shrink: Annotated[int, typer.Option(min=1, help="Divide all lengths of a trace by this.")] = 1
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Drawn: mean tokens of a message.")] = 80.0
    answer_tokens: Annotated[float, typer.Option(min=1, help="Drawn: mean tokens of an answer.")] = 100.0
    turns: Annotated[float, typer.Option(min=1, help="Drawn: mean turns of a conversation.")] = 5.0
    seed: Annotated[int, typer.Option(help="The same seed draws the same traffic.")] = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """What one replica can do."""

    bundle: Annotated[
        Path, typer.Option(help="A bundle's folder; the benchmark beside it says how long steps take.")
    ] = Path("artifacts/candidate")
    steps: Annotated[
        Path | None, typer.Option(help="Lengths of steps as JSON instead, of an engine elsewhere (docs/capacity.md).")
    ] = None
    cache_tokens: Annotated[
        int | None, typer.Option(min=128, help="KV memory of a replica in tokens; by default as the bundle was built.")
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Slots of recurrent state of a replica, those of snapshots among them; by default as the bundle was "
            "built, and none with --steps.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt with its answer; by default that of the bundle.")
    ] = None
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of a replica; by default the benchmark's.")] = (
        None
    )
