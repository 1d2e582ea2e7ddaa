"""Where downloads, compiled kernels and measured costs are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$TAPEOUT_CACHE``, or ``~/.cache/tapeout``."""
    return Path(os.environ.get("TAPEOUT_CACHE") or "~/.cache/tapeout").expanduser()
