"""The same llama in PyTorch, which tests share with the benchmarks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.torch_llama import TorchLlama, training_step

__all__ = ["TorchLlama", "training_step"]
