"""Passes for compilers of the TensorRT family: standard operators, and precision as they read it."""
