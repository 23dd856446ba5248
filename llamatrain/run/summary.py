"""Prints how a run ended, and what to do next."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from llamatrain.checkpoints.filenames import BEST, best_filename
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.platform.terminal import log_line
from llamatrain.report.format import format_loss
from llamatrain.train.config import DONE, StopReason
from llamatrain.train.state import RunState


def log_end(product: str, files: Sequence[Path], stop: StopReason, resume_command: str = "") -> None:
    """Print why the run ended, and its result files or the command that resumes it."""
    if not stop.finished:
        log_line(f"{stop.reason}; resume with: {resume_command}")
        return
    if stop.reason != DONE:
        log_line(f"stopped: {stop.reason}")
    log_line(f"the {product}: {', '.join(map(str, files))}")


def log_best(state: RunState, folder: RunFolder, base: str) -> Path | None:
    """Print which validation was the best and how to use its result. Return the file, if there is one."""
    best, path = state.best, folder.path / BEST
    if best.step is None:
        return None
    text = f"best validation: loss {format_loss(best.loss)} at step {best.step}"
    if not (folder.path / best_filename(best.step)).exists():
        log_line(f"{text}, which has no file")
        return None
    file = shlex.quote(str(path))
    if best.step == state.counters.step:
        log_line(f"{text}, the last one; {path} is the same")
    elif not base:
        log_line(f"{text}: {path}; run it with: llamatrain generate {file}")
    else:
        log_line(f"{text}: {path}; run it with: llamatrain generate {shlex.quote(base)} --lora {file}")
    return path
