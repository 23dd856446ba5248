"""What is asked of trackio, written down."""

from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


def init(
    project: str, *, name: str | None = None, config: dict[str, Any] | None = None, resume: str = "never"
) -> None:
    calls.append(("init", {"project": project, "name": name, "config": config, "resume": resume}))


def log(metrics: dict[str, Any], step: int | None = None) -> None:
    calls.append(("log", {**metrics, "step": step}))


def finish() -> None:
    calls.append(("finish", {}))
