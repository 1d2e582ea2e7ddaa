"""A Hugging Face checkpoint becomes a portable ONNX graph, compared with transformers."""
