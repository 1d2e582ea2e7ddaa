"""Tapeout: from a trained checkpoint to a compiled, quantized and judged inference engine.

The modules of this package are the foundation that all others share. The package itself is also the public Python API:

    import tapeout

    engine = tapeout.load("artifacts/candidate")
    print(tapeout.generate("artifacts/candidate", "Why is the sky blue?"))

Its names are resolved when they are first used, so that importing the foundation stays light.
"""

from __future__ import annotations
