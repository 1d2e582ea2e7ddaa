"""Passes to operators that only ONNX Runtime's CUDA provider has, or that it computes in another layout."""
