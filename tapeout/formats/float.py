"""Weights that are not quantized."""

from tapeout.number_format import Uncoded

FORMAT = Uncoded("float", 32)
