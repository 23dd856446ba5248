"""Counts the processors that this process may use."""

from llamatrain.distributed.comm import get_comm
from llamatrain.platform.cpu import count_cpus


def count_cores() -> int:
    """Return this rank's share of the processors, at least one: ranks on one host share its processors."""
    return max(1, count_cpus() // get_comm().core_sharing)
