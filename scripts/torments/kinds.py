"""The kinds of trials by name, in the order in which they are tried."""

from torments import caches, disks, folders, inputs, kills, large, live, mutants
from torments.core import Kind

MODULES = (kills, disks, inputs, caches, folders, large, live, mutants)
KINDS: dict[str, Kind] = {each.KIND.name: each.KIND for each in MODULES}
