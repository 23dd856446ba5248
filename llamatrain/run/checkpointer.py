"""Writes the checkpoints and results of a run."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.checkpoints.checkpoint import GRADIENTS, KERNELS, Checkpoint
from llamatrain.checkpoints.filenames import BEST, best_filename
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.config.options import format_flag
from llamatrain.engine.device import kernel_class
from llamatrain.engine.profiler import phase
from llamatrain.errors import FileError
from llamatrain.gguf.values import Value
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.report.metrics import Metrics
from llamatrain.run.extra_outputs import ExtraOutputs, format_flags
from llamatrain.run.trainable import Trainable
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.state import RunState


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Writes the state of a run to its folder."""

    options: dict[str, Any]  # JSON values
    keep: int  # checkpoints
    keep_results: int
    extra_outputs: ExtraOutputs
    trainable: Trainable
    metadata: Mapping[str, Value]
    programs: TrainPrograms
    minimizer: MinimizerState | None
    folder: RunFolder
    metrics: Metrics  # flushed before each checkpoint, so that no line is missing
    config: bytes
    warn: Callable[[str], None]
    extra: Mapping[str, Any]  # further entries of training.extra
    resumed_folder: Path | None = None  # the folder of the resumed run
    report_inputs: Callable[[], None] = lambda: None  # warns about changed inputs

    def begin(self, state: RunState) -> str:
        """Save before the first step, so that a full disk shows at once."""
        with phase("saving"):
            try:
                return self._write_first(state)
            except FileError:
                if not self._folder_moved():
                    raise
                return self._write_first(state)

    def _write_first(self, state: RunState) -> str:
        path = self._write_checkpoint(state)
        self._adopt_best(state)
        self._write_config()
        self.metrics.open()
        self.folder.remove_replaced()
        # last, so that a run that cannot begin leaves nothing
        self.trainable.write_extra(self.programs.weights.pull().parts)
        if state.counters.step:  # a kill may have come between the last save and its copies
            try:
                self._copy(state)
            except FileError as error:
                self.warn(f"{error}; trying again at the next save")
        return path

    def _adopt_best(self, state: RunState) -> None:
        """Take over the best result of the run that is resumed, which may lie in another folder."""
        best, path = state.best.step, self.folder.path
        if best in (None, state.counters.step) or self.folder.link_best(
            best, (self.resumed_folder or path) / best_filename(best)
        ):
            return
        self.warn(
            f"{path}: {best_filename(best)}, the best result so far, is missing; {BEST} will be the "
            "next better one"
        )

    def save(self, state: RunState, last: bool = False) -> str:
        """Save a checkpoint and the result.

        The last save goes to another folder if this one cannot be written.
        """
        self.report_inputs()
        try:
            path = self._write_checkpoint(state)
        except FileError as error:
            if not self._folder_moved():  # otherwise the folder was moved during the save
                raise self._save_elsewhere(state, error) if last else error from error
            path = self._write_checkpoint(state)
        try:
            self._write_extra(state)
        except FileError as error:
            if last:
                peft = self.options.get("tune", {}).get("peft")
                flags = format_flags(self.extra_outputs.options, peft and Path(peft), self.folder.path)
                command = f"{format_flag('resume')} {self.folder.path}{flags}"
                raise FileError(
                    f"{error}; the run itself is saved, use {command} to write it there", code=error.code
                ) from error
            self.warn(f"{error}; trying again at the next save")
        return path

    def end(self, state: RunState) -> None:
        """Save once more if the folder was moved after the last save."""
        if self._folder_moved():
            self.save(state, last=True)
            self._write_config()

    def _write_extra(self, state: RunState) -> None:
        """Write the files that are wanted outside the run's folder."""
        self._copy(state)
        self.trainable.write_extra(self.programs.weights.pull().parts)

    def _copy(self, state: RunState) -> None:
        """Copy the checkpoint and the result of this step to the extra outputs."""
        step, result = state.counters.step, self.folder.result_path(self.trainable.result_name)
        if self.keep_results:
            self.folder.link_result(result.name, step, self.keep_results)
        self.extra_outputs.write(step, self.folder.path / f"checkpoint-{step}.gguf", result)

    def _write_checkpoint(self, state: RunState) -> str:
        is_new_folder = self._folder_moved()
        self.metrics.flush()
        path = self.folder.save(self.make_checkpoint(state), self.keep)
        result = self.folder.result_path(self.trainable.result_name)
        self.trainable.write_result(result, self.programs.weights.pull().parts)
        if state.best.step == state.counters.step:
            self.folder.link_best(state.best.step, result)
        self.folder.prune_best()
        if is_new_folder:
            self._write_config()
        return str(path)

    def keep_best(self, state: RunState) -> None:
        """Keep the present weights as the best ones, between two saves."""
        step = state.counters.step
        try:
            try:
                self._write_best(step)
            except FileError:
                if not self._folder_moved():
                    raise
                self._write_config()
                self._write_best(step)
        except FileError as error:
            self.warn(f"{error}; {BEST} is not updated at step {step}, but at the next better one")

    def _write_best(self, step: int) -> None:
        path = self.folder.path / best_filename(step)
        self.trainable.write_result(path, self.programs.weights.pull().parts)
        self.folder.link_best(step, path)
        self.folder.prune_best()

    def _folder_moved(self) -> bool:
        """Return True, after a warning, if the run's folder is no longer where it was."""
        if line := self.folder.locate():
            self.warn(line)
            self.metrics.path = self.folder.result_path(self.metrics.path.name)
        return line is not None

    def _save_elsewhere(self, state: RunState, error: FileError) -> FileError:
        """Save to a fallback folder, and return the error to raise.

        The error names that folder if saving there worked.
        """
        for folder in self.folder.move_to_fallbacks():
            with (
                suppress(FileError),
                self.metrics.copy_to(self.folder.result_path(self.metrics.path.name)) as metrics,
            ):
                fallback = replace(self, metrics=metrics)
                fallback._write_checkpoint(state)
                fallback._write_config()
                with suppress(FileError):  # its disk may be the one that is full
                    fallback._write_extra(state)
                return FileError(
                    f"{error}; the run is saved in {folder} instead, continue with "
                    f"{format_flag('resume')} {folder}",
                    code=error.code,
                )
        return error

    def _write_config(self) -> None:
        with AtomicFile(self.folder.result_path("config.toml")) as file:
            file.write(self.config)

    def make_checkpoint(self, state: RunState) -> Checkpoint:
        """Return a checkpoint of the present state."""
        optimizer, parts = self.programs.spec.optimizer, self.programs.weights.pull().parts
        assert optimizer
        minimizer_state: dict[str, Any] = self.minimizer.state_values() if self.minimizer else {}
        numbers = {
            optimizer.checkpoint_key(name): value
            for name, value in minimizer_state.items()
            if not isinstance(value, np.ndarray)
        }
        vectors = {
            optimizer.checkpoint_key(name): self.programs.full_state(kind)
            for kind, name in optimizer.states.items()
        }
        vectors |= {
            optimizer.checkpoint_key(name): value
            for name, value in minimizer_state.items()
            if isinstance(value, np.ndarray)
        }
        if state.partial and self.programs.grads:
            vectors[GRADIENTS] = self.programs.grads.pull().vector
        return Checkpoint(
            kind=self.trainable.kind,
            metadata=dict(self.metadata),
            weights=self.trainable.checkpoint_tensors(parts),
            options=self.options,
            state=state,
            optimizer=optimizer.checkpoint_name,
            order=list(parts),
            vectors=vectors,
            numbers=numbers,
            extra={
                **self.trainable.checkpoint_extra(),
                **self.extra,
                KERNELS: kernel_class(self.programs.spec.kernels),
            },
        )
