"""Pure tensor arithmetic for quantization, the published checkpoint formats, and the verbs that use them."""
