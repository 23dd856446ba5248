"""The kinds of trials by name, in the order in which they are tried."""

from torments.core import Kind
from torments import caches, disks, folders, inputs, kills, mutants

KINDS: dict[str, Kind] = {each.name: each for each in (kills.KIND, disks.KIND, inputs.KIND, caches.KIND, folders.KIND, mutants.KIND)}
