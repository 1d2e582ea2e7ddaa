"""The parts of a checkpoint folder in Hugging Face's layout that every format shares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantization.checkpoint_formats.source import ExportSource

SHARD_BYTES = 5_000_000_000


def write_config(
    source: ExportSource, folder: Path, quantization: Mapping[str, Any], *, dtype: str | None = None
) -> None:
    """``config.json`` as it was but for how weights are stored; the tokenizer and its companions byte for byte.

    ``dtype``: what readers compute in, where the format asks for it.
    """
    config = source.config | {"quantization_config": dict(quantization)}
    if dtype is not None:
        config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in source.companions():
        shutil.copyfile(path, folder / path.name)
