"""Describes a run before it starts, and prints how it ended and what to do next."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamatrain.checkpoints.filenames import BEST, best_filename
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.model.lora_targets import describe_groups
from llamatrain.platform.terminal import log_line
from llamatrain.report.format import format_loss
from llamatrain.run.prepare import PreparedRun
from llamatrain.train.config import DONE, StopReason
from llamatrain.train.state import RunState


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run."""

    stop: StopReason
    folder: Path
    result: Path
    steps: int  # in all
    seconds: float  # that they took
    best: Path | None = None  # the result at the lowest validation loss
    notes: tuple[str, ...] = ()  # warnings and notes that were printed


def describe_run(prepared: PreparedRun, folder: Path) -> list[tuple[str, str]]:
    """Return the lines of the header: label and text."""
    train, plan, h = prepared.config.train, prepared.fitted.plan, prepared.model.h
    batches = f", {train.grad_acc} batches a step" if train.grad_acc > 1 else ""
    steps = f"{train.iters} step{'s' * (train.iters != 1)}"
    has_rate = "lr" in prepared.resolved.optimizer.used_options() and not prepared.hooks.schedule
    rate = f" with rate {train.lr:g}" if has_rate else ""
    rows = f"{train.batch} rows of {max(prepared.data.rows.lengths)}{batches}"
    recomputed = "" if str(plan.policy) == "none" else f", recomputing {plan.policy}"
    adapter = prepared.fitted.weights.adapter_sizes(h)
    trained = f"; an adapter of {sum(adapter.values()):,} is trained" if adapter else ""
    return [
        ("model", h.describe()),
        ("parameters", f"{h.parameter_count:,}{trained}"),
        *([("adapter", describe_groups(adapter))] if adapter else []),
        (
            "data",
            "; ".join(filter(None, (prepared.data.description, prepared.data.describe_packing(train.batch)))),
        ),
        (
            "training",
            f"{train.optimizer}{rate}, {steps} of {rows}, {plan.spec.describe_precision()}, {plan.spec.threads} threads",
        ),
        ("memory", plan.describe() + recomputed),
        ("folder", str(folder)),
        *([("note", note)] if (note := prepared.config.run.note) else []),
    ]


def join_settings(config: str) -> str:
    """Return the settings of a TOML text in one line."""
    whole = config.replace("[\n    ", "[").replace(",\n    ", ", ").replace(",\n]", "]")
    return ", ".join(line for line in whole.splitlines() if line and not line.startswith("#"))


def log_end(product: str, files: Sequence[Path], stop: StopReason, resume_command: str = "") -> None:
    """Print why the run ended, and its result files or the command that resumes it."""
    if not stop.finished:
        log_line(f"{stop.reason}; resume with: {resume_command}")
        return
    if stop.reason != DONE:
        log_line(f"stopped: {stop.reason}")
    log_line(f"the {product}: {', '.join(map(str, files))}")


def log_best(
    state: RunState, folder: RunFolder, base: str, *, merges: bool = False, rewards: bool = False
) -> Path | None:
    """Print which validation was the best and how to use its result. Return the file, if there is one.

    `base` is the model that an adapter is for; with `merges`, the adapter is for a merged model. With `rewards`,
    validations measure these.
    """
    best, path = state.best, folder.path / BEST
    if best.step is None:
        return None
    score = f"reward {format_loss(-best.loss)}" if rewards else f"loss {format_loss(best.loss)}"
    text = f"best validation: {score} at step {best.step}"
    if not (folder.path / best_filename(best.step)).exists():
        log_line(f"{text}, which has no file")
        return None
    file = shlex.quote(str(path))
    if best.step == state.counters.step:
        log_line(f"{text}, the last one; {path} is the same")
    elif not base:
        log_line(f"{text}: {path}; run it with: llamatrain generate {file}")
    elif merges:
        merge = f"llamatrain export-lora {shlex.quote(base)} --lora {file} --out MERGED.gguf"
        log_line(f"{text}: {path}; merge it with: {merge}")
    else:
        log_line(f"{text}: {path}; run it with: llamatrain generate {shlex.quote(base)} --lora {file}")
    return path
