"""The names of the bits that weights can be kept in."""

from typing import Literal

Quantization = Literal["auto", "none", "int8", "int4"]
"""auto: those of the file, as far as the kernels can; none: the compute type."""
