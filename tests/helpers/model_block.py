"""One block of each architecture, which tests share with the benchmarks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.model_block import BLOCKS, Block

__all__ = ["BLOCKS", "Block"]
