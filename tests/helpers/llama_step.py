"""Whole training steps, which tests share with the benchmarks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.llama_step import CLIP, OPTIMIZER, LlamaStep

__all__ = ["CLIP", "OPTIMIZER", "LlamaStep"]
