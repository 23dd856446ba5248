"""Llamas with random weights, which tests share with the benchmarks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.random_models import TINY, Llama, M, S, Size, frozen_array, llama

__all__ = ["TINY", "Llama", "M", "S", "Size", "frozen_array", "llama"]
