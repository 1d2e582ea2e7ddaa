"""Passes of the target ``cuda`` alone; the others are those of ONNX Runtime and of every graph."""
