"""Options that several commands have, each with its own sentence."""

from typing import Literal

from llamatrain.config.options import COUNT, Option

DeviceName = Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]


THREADS = Option("Threads; default: one per processor.", unit="COUNT", least=1, most=1024)
DEVICE = Option(
    "Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card "
    "if PyTorch finds one.",
    resumable=True,
    announced=True,
)
CTX = Option(
    "Tokens per row; default: the context of the model, at most 512.",
    unit="TOKENS",
    least=1,
    most=1 << 20,
)
BATCH = Option("Rows per batch.", unit="ROWS", least=1, most=1 << 16)
SEED = Option("Seed of initial weights, shuffling and samples.", unit="NUMBER", least=0, most=COUNT)
JSON = Option("Print one JSON object.")
EVERY = Option("Every N steps; 0: never.", unit="STEPS", least=0, most=COUNT)
