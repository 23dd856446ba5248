"""Writes tests/golden/architecture_truth.json: what Hugging Face's classes say of small models of each architecture.

Needs torch, transformers and peft. What it takes and what it says is in `tests/helpers/architecture_torch.py`.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.7g}")


def main() -> None:
    from tests.helpers import architecture_runs, architecture_torch
    from tests.helpers.architecture_models import CASES, shape_of

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        batch = architecture_runs.batch(
            Path(folder), architecture_runs.base(Path(folder), shape_of("llama", "a"))
        )
    truth = {
        f"{arch}-{name}": rounded(architecture_torch.told(shape_of(arch, name), batch))
        for arch, name in CASES
    }
    lines = [f'"batch": {json.dumps(batch)}']
    for case, told in truth.items():
        parts = [f'  "{part}": {json.dumps(value)}' for part, value in told.items()]
        lines.append(f'"{case}": {{\n' + ",\n".join(parts) + "\n}")
    (ROOT / "tests" / "golden" / "architecture_truth.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
