"""What stages read: artifacts of earlier stages, texts of the data and the tokenizer; and how they show progress."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.recipe import Recipe
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.portable_graph import PortableGraph
from tapeout.progress import Steps

if TYPE_CHECKING:
    from engines.bundle import EngineBundle
    from pipeline.sources.source import Source
    from quantization.calibration import Calibration
    from quantization.checkpoint import QuantizedModel

ARTIFACTS = Path("artifacts")
INCUMBENT = ARTIFACTS / "incumbent.json"
TOKENIZER = "tokenizer.json"


_running = list[Steps]()  # of the stage that runs


@contextmanager
def steps_shown(stage: str) -> Generator[None]:
    """What takes long in a stage and shows nothing of its own is named every ten seconds."""
    with Steps(stage) as steps:
        _running.append(steps)
        try:
            yield
        finally:
            _running.remove(steps)


def stage_progress(stage: str) -> Callable[[str], None]:
    """Progress of a stage as a line on the terminal; the same step is said once."""
    from rich.console import Console

    console, last = Console(stderr=True, highlight=False), [""]

    def progress(step: str) -> None:
        if step != last[0]:
            console.print(f"  [dim]{stage}:[/] {step}")
            last[0] = step
        for steps in _running:
            steps.begin(step)

    return progress


def load_source() -> Artifact[Source]:
    from pipeline.sources.source import Source

    return artifact.load(ARTIFACTS / "source", Source)


def checkpoint_of(source: Artifact[Source]) -> tuple[Path, str]:
    """The folder of the checkpoint, and the name of the GGUF file in it, if it is one."""
    entry = source.folder / source.record.model_entry
    return (entry.parent, entry.name) if source.record.model_kind == "gguf" else (entry, "")


def adapter_of(source: Artifact[Source]) -> Path | None:
    return source.folder / source.record.adapter_entry if source.record.adapter_entry else None


def load_graph() -> Artifact[PortableGraph]:
    return artifact.load(ARTIFACTS / "graph", PortableGraph)


def load_calibration() -> Artifact[Calibration]:
    from quantization.calibration import Calibration

    return artifact.load(ARTIFACTS / "calibration", Calibration)


def load_quantized() -> Artifact[QuantizedModel]:
    from quantization.checkpoint import QuantizedModel

    return artifact.load(ARTIFACTS / "quantized", QuantizedModel)


def load_bundle(folder: Path) -> Artifact[EngineBundle]:
    from engines.bundle import EngineBundle

    return artifact.load(folder, EngineBundle)


def corpus_texts(recipe: Recipe, heldout: int) -> tuple[list[str], list[str]]:
    """Calibration texts and so many held-out texts, disjoint, from one column."""
    from evals.kinds.text import HeldOutSettings
    from pipeline.sources.corpus import calibration_and_heldout

    return calibration_and_heldout(
        load_source(),
        recipe.calibrate,
        heldout,
        recipe.seed,
        fast_tokenizer(),
        document_tokens=recipe.section(HeldOutSettings).document_tokens if heldout else None,
    )


def calibration_samples(recipe: Recipe) -> list[list[int]]:
    """Token ids of the calibration samples, where the plan is chosen by them; a written plan asks for none."""
    return encode_texts(corpus_texts(recipe, heldout=0)[0]) if recipe.plan.schemes == "auto" else []


def fast_tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ARTIFACTS / "graph" / TOKENIZER))


def encode_texts(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = fast_tokenizer()
    return [tokenizer.encode(text).ids for text in texts]
