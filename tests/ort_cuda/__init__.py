"""A dry run of ``ort-cuda``: the real CUDA provider over a stand-in for CUDA, and graphs that the CPU can compute."""
