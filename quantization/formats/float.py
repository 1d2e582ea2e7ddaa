"""Float weights have no codes: a checkpoint holds them as tensors like any other."""

from tapeout.schemes import Refusal

FORMAT = Refusal("float", "its weights have no codes; they are stored as a plain tensor")
