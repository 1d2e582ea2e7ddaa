"""``tapeout export-checkpoint``: the quantized model in a format that others load."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantization.checkpoint_formats.write import export_checkpoint
from tapeout.progress import ProgressBar


def run(artifact: Path, name: str, to: Path, wider: bool) -> tuple[dict[str, Any], str]:
    """What was written, for a script and for people. Progress goes to standard error."""
    with ProgressBar(title=name, unit="tensor") as bar:
        found = export_checkpoint(artifact, name, to.resolve(), wider=wider, progress=bar.show)
    lines = [f"{found.folder}: {found.format}, {found.bytes / 1e6:.1f} MB"]
    lines += [f"  {count:5} {stored}" for stored, count in sorted(found.stored.items())]
    reasons = Counter((item["scheme"], item["stored"], item["reason"]) for item in found.wider)
    lines += [f"wider: {n} in {scheme} as {stored}: {reason}" for (scheme, stored, reason), n in reasons.items()]
    lines += [f"note: {note}" for note in found.notes]
    return asdict(found), "\n".join(lines)
