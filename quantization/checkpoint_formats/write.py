"""Export a QuantizedModel: decide where every parameter goes, refuse what does not fit, then write all or nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quantization.checkpoint import QuantizedModel
from quantization.checkpoint_formats import FLOAT_STORED, ParameterPlace
from quantization.checkpoint_formats.autoawq import AutoAWQ
from quantization.checkpoint_formats.compressed import CompressedTensors
from quantization.checkpoint_formats.gguf import Gguf
from quantization.checkpoint_formats.source import ExportFormat, ExportSource
from tapeout.artifact import load
from tapeout.durable import replace_folder
from tapeout.errors import ArtifactError, QuantizationError

FORMATS: dict[str, ExportFormat] = {fmt.name: fmt for fmt in (AutoAWQ(), CompressedTensors(), Gguf())}


@dataclass(frozen=True)
class Exported:
    """``stored``: how many parameters are stored how. ``wider``: those that take more bits than the plan gave them."""

    format: str
    folder: str
    model: str  # digest of the QuantizedModel
    bytes: int
    stored: dict[str, int]
    wider: tuple[dict[str, str], ...]
    notes: tuple[str, ...]


def export_checkpoint(
    artifact: Path, name: str, to: Path, *, wider: bool, progress: Callable[[int, int], None]
) -> Exported:
    """Write ``to``, a new folder. ``progress`` is called with the parameters that are written, and of how many.

    ``wider``: store what the format cannot hold in more bits instead of refusing it.
    """
    if name not in FORMATS:
        raise QuantizationError(f"--format {name}", expected=f"one of {', '.join(sorted(FORMATS))}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ArtifactError(f"{to} exists", expected="a new folder", remedy="remove it, or choose another --to")
    source, fmt = ExportSource(load(artifact, QuantizedModel)), FORMATS[name]
    places = fmt.places(source)
    changed = [place for place in places if place.reason]
    if changed and not wider:
        raise _refusal(source, fmt, changed)
    partial = to.with_name(f".{to.name}.partial")
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, len(places))

    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _require_space(places, partial)
        fmt.write(source, places, partial, advance)
        replace_folder(partial, to)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {to}: {error.strerror or error}", remedy="free disk space or fix the permissions"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        format=name,
        folder=str(to),
        model=source.artifact.digest,
        bytes=sum(path.stat().st_size for path in to.iterdir()),
        stored=dict(Counter(_shown(place) for place in places)),
        wider=tuple(
            {
                "tensor": place.parameter.name,
                "scheme": place.parameter.scheme.name,
                "stored": place.stored,
                "reason": place.reason,
            }
            for place in changed
        ),
        notes=("scales of the KV cache are left out: readers keep their own cache",) if source.has_kv_scales else (),
    )


def _shown(place: ParameterPlace) -> str:
    scheme = place.parameter.scheme.name
    return place.stored if place.stored in (FLOAT_STORED, scheme) else f"{scheme} as {place.stored}"


def _refusal(source: ExportSource, fmt: ExportFormat, changed: Sequence[ParameterPlace]) -> QuantizationError:
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for place in changed:
        kinds.setdefault((place.parameter.scheme.name, place.reason, place.stored), []).append(place.parameter.name)
    lines = [
        f"{_few(names)} in {scheme}: {reason} (--wider: {stored})" for (scheme, reason, stored), names in kinds.items()
    ]
    return QuantizationError(
        f"{fmt.name} cannot hold {len(changed)} tensors of {source.folder} as they are:\n    " + "\n    ".join(lines),
        expected="tensors that the format holds exactly, in the bits that they have",
        remedy=f"--wider stores these in more bits, without rounding; or quantize with {fmt.recipe}",
    )


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} tensors, such as {names[0]},"


def _require_space(places: Sequence[ParameterPlace], folder: Path) -> None:
    """Most bytes of the weights: floats as float32, codes in a byte with their scales."""
    needed = sum(prod(place.parameter.shape) * (4 if place.stored == FLOAT_STORED else 1.25) for place in places)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ArtifactError(
            f"{free / 1e9:.1f} GB are free in {folder.parent}",
            expected=f"up to {needed / 1e9:.1f} GB",
            remedy="free disk space, or choose another --to",
        )
