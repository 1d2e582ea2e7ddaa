"""From a portable graph and quantized tensors to an engine bundle, and back to a loaded engine."""
