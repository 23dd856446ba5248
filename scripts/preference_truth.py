"""Writes tests/golden/preference_truth.json: losses and gradients of small batches by TRL.

Needs trl, peft and torch.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers import trl_peer
from tests.helpers.preferences import CASES, ours

FILE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "preference_truth.json"


def compute_case(case: str) -> Any:
    """Return what TRL computes for a case."""
    with tempfile.TemporaryDirectory() as folder:
        _, batch = ours(case, Path(folder) / "ours")
        return round_values(trl_peer.found(case, batch, Path(folder)).told)


def round_values(value: Any) -> Any:
    """Round all numbers in JSON to seven digits."""
    if isinstance(value, dict):
        return {name: round_values(item) for name, item in value.items()}
    return [round_values(item) for item in value] if isinstance(value, list) else float(f"{value:.7g}")


if __name__ == "__main__":
    results = {case: compute_case(case) for case in CASES}
    FILE.write_text(json.dumps(results, indent=0) + "\n")
