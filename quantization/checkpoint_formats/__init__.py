"""Write a quantized model in formats that others load: AutoAWQ, compressed-tensors, GGUF (docs/formats.md).

Nothing is rounded again: every weight in the file has the value that it has in the QuantizedModel, bit for bit. What a
format cannot hold is refused, or, where asked, stored in more bits.
"""
