"""The definition of every op: what it does to arrays, in plain numpy, in the precision of its sources.

A kernel takes the sources' arrays and the node's attributes, and gives the outputs. bfloat16 arrays are uint16.
"""

from llamatrain.kernels.reference import arithmetic, layers, movement
from llamatrain.kernels.reference.registry import KERNELS, run

__all__ = ["KERNELS", "arithmetic", "layers", "movement", "run"]
