"""A model learns sums from rewards of its own answers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench.arithmetic import improve_sums


def test_rewards_rise(tmp_path: Path) -> None:
    """The base was trained on sums of which most are wrong."""
    rewards = improve_sums(tmp_path, digits=5, base_iters=300, iters=80)
    assert sum(rewards[:2]) / 2 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.8
