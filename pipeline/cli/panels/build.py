"""Commands that build engines and checkpoints, and change the recipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.shared import Artifacts, Json, Params, show

commands = typer.Typer()
on_panel = partial(commands.command, rich_help_panel="Build")


@on_panel()
def build(
    target: Annotated[
        str,
        typer.Option(
            help="A target, and the GPUs to compile for, or levels of a CPU: `tensorrt-rtx:sm89,sm120`, "
            "`ort-cpu:x86-64-avx2`."
        ),
    ],
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of TensorRT: fp16 (default), bf16, int4, or by a plan: fp8 (beside 16 bits), auto (int4, FP8, 16 "
            "bits). Other targets take the recipe's plan, and no precision."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Only print the lowering, pass by pass.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A quantized checkpoint to take weights from; by default made of the float one's."),
    ] = None,
    batches: Annotated[str, typer.Option(help="Decode batch buckets; by default 1 and build.slots.")] = "",
    documents: Annotated[int, typer.Option(help="Held-out documents of portable evidence; 0 takes none.")] = 8,
    artifacts: Artifacts = Path("artifacts"),
    params: Params = Path("params.yaml"),
) -> None:
    """Build for hardware that this machine may lack, one bundle each under artifacts/targets; or explain a lowering.

    At a level of a CPU the bundle is the recipe's candidate, with the kernels of that level only.

    Example: `tapeout build --target tensorrt-rtx:sm89,sm120 --precision fp8`
    """
    from engines.load import find_target
    from pipeline.cli import build as command
    from pipeline.cli.tables import console
    from pipeline.recipe import load_recipe
    from pipeline.stages import hardware

    name, capabilities = command.parse_target(target)
    recipe = load_recipe(params)
    request = hardware.BuildRequest(
        artifacts=artifacts,
        recipe=recipe,
        precision=command.parse_precision(precision, find_target(name)),
        checkpoint=checkpoint,
        batches=command.parse_batches(batches, recipe.build.slots),
        documents=documents,
    )
    if explain:
        command.require_known(name, capabilities)
        console().print(command.pass_table(hardware.explain(request, find_target(name))))
    else:
        command.build(request, name, capabilities, console())


@on_panel("export-checkpoint")
def export_checkpoint(
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            help="autoawq (vLLM), compressed-tensors (transformers) or gguf (llama.cpp).",
            metavar="FORMAT",
        ),
    ],
    to: Annotated[Path, typer.Option(help="The folder to write; it must not exist yet.")],
    artifact: Annotated[Path, typer.Argument(help="The quantized model: the artifact of the stage quantize.")] = Path(
        "artifacts/quantized"
    ),
    wider: Annotated[
        bool, typer.Option("--wider", help="Store what the format cannot hold in more bits, instead of refusing it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the quantized model as a checkpoint that vLLM, transformers or llama.cpp loads (docs/formats.md).

    No weight is rounded again. What the format cannot hold is refused, or with --wider stored in more bits: 6-bit
    weights as 8-bit ones, for example.

    Example: `tapeout export-checkpoint --format gguf --to model-gguf --wider`
    """
    from pipeline.cli import checkpoint as command

    show(*command.run(artifact, format_name, to, wider), as_json)


@on_panel()
def stage(
    name: Annotated[str, typer.Argument(help="A stage of dvc.yaml, such as export or quantize.")],
    params: Params = Path("params.yaml"),
) -> None:
    """Run one stage on the artifacts that exist. `dvc repro` runs only the stages that need it.

    Example: `tapeout stage export`
    """
    from pipeline.stages import wiring

    wiring.run(name, params)


@on_panel()
def recipe(
    name: Annotated[
        str | None, typer.Argument(help="A recipe that ships with Tapeout; without it, they are listed.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Change the parameter file instead of printing it.")] = False,
    params: Params = Path("params.yaml"),
) -> None:
    """Lay a shipped recipe over your parameters: print the result, or write it. `git diff` shows what changed.

    Example: `tapeout recipe w4-rtn --write && make repro`
    """

    from pipeline.recipes import shipped

    if name is None:
        for known, sentence in shipped.names().items():
            typer.echo(f"{known:10} {sentence}")
        return
    text = shipped.overlay(name, params)
    if write:
        params.write_bytes(text.encode())
        typer.echo(f"{params} now holds {name}; run `make repro`")
    else:
        typer.echo(text, nl=False)
