"""Writes tests/golden/architectures: results of small models of each architecture by Hugging Face.

`python scripts/architecture_truth.py qwen3 lfm2` writes the files of these two alone.
Needs torch, transformers and peft. `tests/helpers/architecture_torch.py` defines the inputs and the results.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "golden" / "architectures"
sys.path.insert(0, str(ROOT))


def round_values(value: Any) -> Any:
    """Round all numbers in JSON to seven digits."""
    if isinstance(value, dict):
        return {key: round_values(item) for key, item in value.items()}
    return [round_values(item) for item in value] if isinstance(value, list) else float(f"{value:.7g}")


def main(*names: str) -> None:
    """Write the files of the named architectures, or of all."""
    from tests.helpers import architecture_runs, architecture_torch, embedding_models
    from tests.helpers.architecture_models import SHAPES, shape_of

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        batch = architecture_runs.batch(
            Path(folder), architecture_runs.base(Path(folder), shape_of("llama", "a"))
        )
    (FOLDER / "batch.json").write_text(json.dumps(batch) + "\n")
    for arch in names or [*SHAPES, *embedding_models.EMBEDDERS]:
        if arch in SHAPES:
            results = {name: architecture_torch.told(shape, batch) for name, shape in SHAPES[arch].items()}
            write_results(FOLDER / f"{arch}.json", results)
        else:
            shapes = embedding_models.EMBEDDERS[arch]
            results = {name: embedding_models.told(shape) for name, shape in shapes.items()}
            write_results(FOLDER.parent / "embeddings" / f"{arch}.json", results)


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write the results of each shape, a line for each part."""
    cases = []
    for name, result in results.items():
        parts = [f'  "{part}": {json.dumps(value)}' for part, value in round_values(result).items()]
        cases.append(f'"{name}": {{\n' + ",\n".join(parts) + "\n}")
    path.write_text("{\n" + ",\n".join(cases) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
