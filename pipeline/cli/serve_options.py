"""What ``tapeout serve``, ``gateway`` and ``engine`` can be told. Typer's options are made from these classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.shared import EngineKey, JudgeBy, Params, PublicKey, Threads, not_empty

if TYPE_CHECKING:
    from pipeline.registry.pull import Requirements


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is opened, and how much it is given to do."""

    threads: Threads = 0
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Memory for so many sequences of full length: their keys and values, and two slots each where the "
            "model has recurrent state; by default as built.",
        ),
    ] = None
    kv_bytes: Annotated[
        str | None,
        typer.Option(
            help="Instead of --slots: most memory of keys, values and recurrent state: 2GiB; or `free`: what an engine "
            "of cuda leaves of its GPU."
        ),
    ] = None
    snapshots: Annotated[
        str | None,
        typer.Option(
            help="Copies of recurrent state that are kept so that prompts, and the turns of a conversation, go on from "
            "them: a number, or a share of all memory of state such as 25%; by default one for each of --slots.",
        ),
    ] = None
    map_experts: Annotated[
        bool | None,
        typer.Option(
            help="Leave the weights of experts in their file, from which the system reads what memory has no room for; "
            "by default where all weights do not fit the memory that is available.",
        ),
    ] = None
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused with 429.")] = 1024
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once; by default 64, or as many as were measured.")
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most tokens that prompt lookup guesses for a request in a step; 0 switches it off. By default 8, or "
            "as many as were measured.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ApprovalOptions:
    """What an engine must have before it is served."""

    unsafe: Annotated[bool, typer.Option("--unsafe", help="Serve a bundle that has no PASS verdict.")] = False
    public_key: PublicKey = None
    judge_by: JudgeBy = None

    @property
    def required(self) -> Requirements:
        from pipeline.registry.pull import Requirements

        return Requirements(unsafe=True) if self.unsafe else Requirements(self.public_key, self.judge_by)


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Where clients are answered, who they may be, and what is kept of their calls."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            callback=not_empty,
            help="What requests call the model; may be given more than once. Responses have the first.",
        ),
    ] = None
    queue_seconds: Annotated[
        float | None, typer.Option(min=0, help="A request that waits longer is ended with 408; without, it waits.")
    ] = None
    request_seconds: Annotated[
        float | None, typer.Option(min=0, help="A request that takes longer, queue included, is ended with 408.")
    ] = None
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time that running requests have after SIGTERM.")] = 30.0
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            callback=not_empty, help="Clients must send it; may be given more than once. Or TAPEOUT_API_KEYS."
        ),
    ] = None
    keys_file: Annotated[Path | None, typer.Option(help="YAML file of keys and their limits: `tapeout keys new`.")] = (
        None
    )
    usage_database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL for usage records, such as sqlite:///usage.db; without, none.")
    ] = None
    usage_journal: Annotated[
        Path, typer.Option(help="Folder of the journal that makes usage records exact; one for each server.")
    ] = Path("usage.journal")
    limits_database: Annotated[
        str | None,
        typer.Option(
            help="SQLAlchemy URL of limits of keys that all servers with this URL share; without, each counts its own."
        ),
    ] = None
    traffic_log: Annotated[
        Path | None, typer.Option(help="Folder for a redacted sample of prompts and responses; without, none.")
    ] = None
    traffic_share: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests in the traffic log.")] = 0.01
    traffic_redactor: Annotated[
        list[str] | None, typer.Option(help="package.module:function that also redacts; may be given more than once.")
    ] = None
    slo: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with a section `slo`: objectives whose events are counted (docs/capacity.md). A gateway "
            "also finds the section in its own file."
        ),
    ] = None
    traces: Annotated[
        bool, typer.Option("--traces", help="Send OpenTelemetry spans by OTLP (OTEL_EXPORTER_OTLP_ENDPOINT).")
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages of this origin may call the server; may be given more than once, * is every page."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    source: Annotated[
        str | None,
        typer.Argument(
            help="A bundle's folder, models:/NAME@ALIAS, which is followed, or models:/NAME/VERSION; by default the "
            "champion of the recipe's model."
        ),
    ] = None
    http: HttpOptions
    opening: EngineOptions
    follow_seconds: Annotated[
        float, typer.Option(min=0, help="How often to look for a new champion, which is swapped in; 0 never looks.")
    ] = 5.0
    approval: ApprovalOptions
    shadow: Annotated[
        str | None,
        typer.Option(help="A bundle's folder, or models:/NAME@challenger: mirror calls to it (docs/online.md)."),
    ] = None
    share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of the calls that are mirrored; by default the recipe's online.share."),
    ] = None
    shadow_log: Annotated[Path, typer.Option(help="Folder of the observations; one for each pair of engines.")] = Path(
        "shadow"
    )
    shadow_threads: Annotated[int, typer.Option(min=1, help="Of the challenger.")] = 1
    engine: Annotated[
        str | None,
        typer.Option(
            help="Serve an engine that runs elsewhere: tcp:HOST:PORT or unix:PATH of `tapeout engine`.",
            metavar="ADDRESS",
        ),
    ] = None
    engine_key: EngineKey = None
    params: Params = Path("params.yaml")
