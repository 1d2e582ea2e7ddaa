"""Passes that put in operators of ONNX Runtime, and our own kernels for it."""
