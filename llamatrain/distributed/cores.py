"""Count the processors that this process may use."""

from llamatrain.distributed.comm import world
from llamatrain.platform.cpu import processors


def cores() -> int:
    """Return this rank's share of the processors, at least one: ranks on one host share its processors."""
    return max(1, processors() // world().sharing)
