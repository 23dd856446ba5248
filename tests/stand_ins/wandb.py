"""What is asked of Weights and Biases, written down; `fails` names what does not work."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []
fails: set[str] = set()
steps: dict[str, int] = {}  # of runs, by id
current = ""


def _called(what: str, told: dict[str, Any]) -> None:
    json.dumps(told)  # what is given can be sent
    calls.append((what, told))
    if what in fails:
        raise ConnectionError(f"{what}: the network\nis gone")


def init(**told: Any) -> SimpleNamespace:
    global current
    print("wandb: words on the wrong stream")
    current = told["id"]
    _called("init", told)
    Path(told["dir"], "wandb").mkdir(exist_ok=True)
    return SimpleNamespace(step=steps.get(current, 0))


def log(data: dict[str, Any], step: int) -> None:
    _called("log", {**data, "step": step})
    steps[current] = step + 1


def finish(exit_code: int = 0) -> None:
    _called("finish", {"exit_code": exit_code})
