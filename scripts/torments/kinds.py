"""The kinds of trials by name, in the order in which they run."""

from torments import caches, disks, environment, folders, inputs, kills, large, mutants
from torments.trial import Kind

MODULES = (kills, disks, inputs, caches, folders, large, environment, mutants)
KINDS: dict[str, Kind] = {module.KIND.name: module.KIND for module in MODULES}
