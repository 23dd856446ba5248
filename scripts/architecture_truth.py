"""Writes tests/golden/architecture_truth.json: results of small models of each architecture by Hugging Face.

Needs torch, transformers and peft. `tests/helpers/architecture_torch.py` defines the inputs and the results.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def round_values(value: Any) -> Any:
    """Round all numbers in JSON to seven digits."""
    if isinstance(value, dict):
        return {key: round_values(item) for key, item in value.items()}
    return [round_values(item) for item in value] if isinstance(value, list) else float(f"{value:.7g}")


def main() -> None:
    """Write the file."""
    from tests.helpers import architecture_runs, architecture_torch
    from tests.helpers.architecture_models import CASES, shape_of

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        batch = architecture_runs.batch(
            Path(folder), architecture_runs.base(Path(folder), shape_of("llama", "a"))
        )
    truth = {
        f"{arch}-{name}": round_values(architecture_torch.told(shape_of(arch, name), batch))
        for arch, name in CASES
    }
    lines = [f'"batch": {json.dumps(batch)}']
    for case, result in truth.items():
        parts = [f'  "{part}": {json.dumps(value)}' for part, value in result.items()]
        lines.append(f'"{case}": {{\n' + ",\n".join(parts) + "\n}")
    (ROOT / "tests" / "golden" / "architecture_truth.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
