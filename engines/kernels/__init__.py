"""Kernels of our own, by the processors that they are for."""
