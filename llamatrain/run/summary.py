"""How a run ended, in a line or two, and what is left to do."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from llamatrain.checkpoints.filenames import BEST, best_filename
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.platform.terminal import log_line
from llamatrain.report.format import format_loss
from llamatrain.train.config import DONE, StopReason
from llamatrain.train.state import RunState


def tell_end(made: str, files: Sequence[Path], outcome: StopReason, to_go_on: str = "") -> None:
    if not outcome.finished:
        log_line(f"{outcome.reason}; to go on: {to_go_on}")
        return
    if outcome.reason != DONE:
        log_line(f"stopped: {outcome.reason}")
    log_line(
        f"the {made}: {'; beside it '.join(map(str, files[:2]))}{''.join(f', {file}' for file in files[2:])}"
    )


def tell_best(state: RunState, folder: RunFolder, base: str) -> Path | None:
    """Which validation was the best, and how what was made then is used, alone or with its base: the file, if there is one."""
    best, path = state.best, folder.path / BEST
    if best.step is None:
        return None
    told = f"the best validation: loss {format_loss(best.loss)} at step {best.step}"
    if not (folder.path / best_filename(best.step)).exists():
        log_line(f"{told}, of which there is no file")
        return None
    file = shlex.quote(str(path))
    if best.step == state.counters.step:
        log_line(f"{told}, the last: {path} is the same")
    elif not base:
        log_line(f"{told}: {path}; `llamatrain generate {file}` runs it")
    else:
        log_line(f"{told}: {path}; `llamatrain generate {shlex.quote(base)} --lora {file}` runs it")
    return path
