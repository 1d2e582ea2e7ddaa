"""``tapeout build``: bundles for hardware that need not be present, and how a graph is lowered, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from engines.bundle import PassReport
from engines.load import find_target, graph_target, hardware_target
from engines.target import GraphTarget, HardwareTarget, Target
from pipeline.stages import hardware
from pipeline.stages.hardware import BuildRequest, Built
from tapeout.artifact import Artifact
from tapeout.errors import ArtifactError, BuildError
from tapeout.progress import ProgressBar, Steps

if TYPE_CHECKING:
    from engines.bundle import LoweredGraph
    from evals.portable import PortableReport
    from evals.verdict import Verdict

DEFAULT_PRECISION = "fp16"
# By TensorRT's names, for which 80 columns have no room.
NATIVE_LAYERS = {"ATTENTION_INPUT": "attention", "KV_CACHE_UPDATE": "cache", "ROTARY_EMBEDDING": "rotary"}


def parse_target(text: str) -> tuple[str, tuple[str, ...]]:
    """A target and the compute capabilities to compile for.

    >>> parse_target("tensorrt-rtx:sm89,sm120")
    ('tensorrt-rtx', ('sm89', 'sm120'))
    """
    name, _, rest = text.partition(":")
    return name, tuple(part.strip().lower() for part in rest.split(",") if part.strip())


def parse_precision(text: str | None, target: Target[Any]) -> str:
    """What to compile for. :class:`BuildError` where the recipe's plan decides, so that what is asked for would not."""
    if text is not None and not target.capabilities.precisions:
        raise BuildError(
            f"--precision {text} for {target.name}",
            expected="no precision: the recipe's plan says how each tensor of this target is stored",
            remedy="leave --precision out, and write the schemes into plan.schemes of the recipe",
        )
    return text or DEFAULT_PRECISION


def require_known(name: str, capabilities: Sequence[str]) -> None:
    """:class:`BuildError` for hardware that the target does not compile for, or a level that it does not have."""
    target = find_target(name)
    for capability in capabilities:
        if isinstance(target, HardwareTarget):
            target.require(capability)
        else:
            target.at(capability)


def parse_batches(text: str, slots: int) -> tuple[int, ...]:
    """Decode buckets as written, ``1,8,32``; by default one row and all slots. :class:`BuildError` if not counts."""
    if not text:
        return (1, slots)
    if not all(part.strip().isdigit() and int(part) for part in text.split(",")):
        raise BuildError(f"--batches {text}", expected="batch sizes, such as 1,8,32")
    return tuple(sorted({int(part) for part in text.split(",")}))


def build(request: BuildRequest, name: str, capabilities: Sequence[str], console: Any) -> None:
    """Build for every capability, or level of native kernels, and print the bundles.

    A capability that the compiler refuses does not stop the others; its :class:`BuildError` is raised at the end.
    """
    if capabilities and isinstance(find_target(name), GraphTarget):
        _build_levels(request, {level: graph_target(f"{name}:{level}") for level in capabilities}, console)
        return
    if find_target(name).capabilities.ahead_of_time:
        _build_levels(request, {"": graph_target(name)}, console)
        return
    target = hardware_target(name)
    if not capabilities:
        raise BuildError(
            f"--target {name} names no hardware", expected=f"compute capabilities, such as {name}:sm89,sm120"
        )
    require_known(name, capabilities)
    with _steps(console, "lowering") as begin:
        lowered = hardware.lower(request, target, begin)
    report = _evidence(request, lowered, console)
    built: list[Built] = []
    refused: list[BuildError] = []
    for capability in capabilities:
        with ProgressBar(title=capability, unit="step") as bar:

            def progress(phase: str, done: int, total: int, *, name: str = capability) -> None:
                bar.set_description(f"{name}: {phase}", refresh=False)
                bar.show(done, total or None)

            try:
                built.append(hardware.compile_for(request, target, capability, lowered, report, progress))
            except BuildError as error:
                refused.append(error)
    if built:
        console.print(bundle_table(built))
        for item in built:  # whole, so that it can be copied: a cell of the table would fold it
            console.print(f"{item.bundle.folder.name}: {item.bundle.folder}", markup=False, soft_wrap=True)
    if refused:
        raise refused[0]


def _build_levels(request: BuildRequest, targets: Mapping[str, GraphTarget], console: Any) -> None:
    for level, target in targets.items():
        with _steps(console, level or target.name) as begin:
            built = hardware.build_at(request, target, level, begin)
        levels = ", ".join(one.level for one in built.record.hardware if one.level)
        console.print(f"{built.folder}: {f'kernels for {levels}' if levels else 'no kernels of ours'}", markup=False)
        named = f"{target.name}:{level}".removesuffix(":")
        console.print(f"judge it: set build.target to {named}, then `dvc repro`", markup=False)


@contextmanager
def _steps(console: Any, title: str) -> Generator[Callable[[str], None]]:
    """Takes the name of each step as it begins; a terminal shows it at once, a log once it takes long."""
    if console.is_terminal:
        with console.status(title) as status:
            yield lambda step: status.update(f"{title}: {step}")
    else:
        with Steps(title) as steps:
            yield steps.begin


def _evidence(request: BuildRequest, lowered: Artifact[LoweredGraph], console: Any) -> Artifact[PortableReport] | None:
    """Print the portable evidence, or why there is none."""
    if not request.documents:
        return None
    try:
        report = hardware.evidence(request, lowered)
    except (ArtifactError, BuildError) as error:
        console.print(f"no portable evidence: {error.found} ({error.remedy})", markup=False)
        return None
    found = report.record
    console.print(
        f"portable evidence on {found.documents} held-out documents: KL {found.kl:.2g}, "
        f"same top token {found.top_token:.1%}, perplexity x{found.perplexity_ratio:.4f}"
    )
    return report


def pass_table(reports: Sequence[PassReport]) -> Table:
    table = Table(title="Lowering", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("pass", "matched", "nodes before", "after", "declined"):
        table.add_column(column, justify="left" if column in ("pass", "declined") else "right", overflow="fold")
    for report in reports:
        nodes = (str(report.nodes_before), str(report.nodes_after))
        table.add_row(report.name, str(report.matched), *nodes, escape("\n".join(reasons(report.declined))))
    return table


def reasons(declined: Sequence[str]) -> list[str]:
    """Why a pass declined, every reason once.

    >>> reasons(["layer 0: soft cap 50", "layer 1: soft cap 50", "no Sigmoid in the graph"])
    ['layer 0 and 1 more: soft cap 50', 'no Sigmoid in the graph']
    """
    subjects: dict[str, list[str]] = {}
    for sentence in declined:
        subject, colon, reason = sentence.rpartition(": ")
        subjects.setdefault(reason, []).append(subject + colon)
    return [
        (f"{first.removesuffix(': ')} and {len(others)} more: " if others else first) + reason
        for reason, (first, *others) in subjects.items()
    ]


def bundle_table(built: Sequence[Built]) -> Table:
    table = Table(
        title="Engines", title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    numbers = ("MB", "seconds", "layers", "warnings")
    for column in ("bundle", *numbers[:3], "native", numbers[3], "verdict"):
        justify = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "verdict")
    for item in built:
        compiled = item.bundle.record.compiled
        assert compiled is not None
        native = [f"{compiled.network.get(layer, 0)} {name}" for layer, name in NATIVE_LAYERS.items()]
        table.add_row(
            escape(item.bundle.folder.name),
            f"{compiled.engine_bytes / 1e6:.0f}",
            f"{item.seconds:.0f}",
            str(sum(compiled.network.values())),
            "\n".join(native),
            str(len(compiled.warnings)),
            "none: no evidence" if item.verdict is None else _headline(item.verdict.record),
        )
    return table


def _headline(verdict: Verdict) -> str:
    reasons = [check.reason for check in verdict.checks if check.outcome is verdict.outcome]
    return f"{verdict.outcome}: {reasons[0]}"
