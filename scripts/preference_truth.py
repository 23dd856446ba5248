"""Writes tests/golden/preference_truth.json: what TRL says of the losses and gradients of small batches. Needs trl, peft, torch."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers import trl_peer
from tests.helpers.preferences import CASES, ours

PLACE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "preference_truth.json"


def truth(case: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        _, batch = ours(case, Path(folder) / "ours")
        return rounded(trl_peer.found(case, batch, Path(folder)).told)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.7g}")


if __name__ == "__main__":
    made = {case: truth(case) for case in CASES}
    PLACE.write_text(json.dumps(made, indent=0) + "\n")
