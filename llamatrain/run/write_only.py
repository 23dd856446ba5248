"""Writes the result of a checkpoint without training: --only-write-model and --only-write-lora."""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.config.options import format_flag
from llamatrain.data.options import DataOptions
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import UsageError
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.platform.terminal import log_line
from llamatrain.run.choose_trainable import choose_trainable
from llamatrain.run.config import RunConfig
from llamatrain.run.extra_outputs import ExtraOutputs, check_extra_outputs, drop_unnamed
from llamatrain.run.folder import open_folder
from llamatrain.run.inputs import RunInputs
from llamatrain.run.model import make_model
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.prepare import input_files, resolve_peft_folder
from llamatrain.run.request import RunRequest
from llamatrain.run.restore import check_weights
from llamatrain.run.resume import ResumePoint
from llamatrain.run.signals import Interrupts
from llamatrain.run.summary import RunResult, log_end
from llamatrain.run.trainable import Trainable
from llamatrain.train.config import DONE, StopReason


def write_only(
    config: RunConfig, inputs: RunInputs, request: RunRequest, interrupts: Interrupts
) -> RunResult:
    """Write the result of a checkpoint, without training."""
    folder_options = request.folder_options
    resume_point, product = checkpoint_to_write(inputs, request.folder_options)
    if get_comm().size > 1:
        raise UsageError(
            f"--only-write-{product} needs a single process (got {get_comm().size}); start it without "
            "mpiexec",
            code="single-process",
        )
    if request.config.run.profile:
        raise UsageError(
            f"--profile has no effect with --only-write-{product}; leave it out", code="unused-option"
        )
    model = make_model(config, inputs, ())
    if folder_options.overwrite and not config.outs.files_by_option:
        raise UsageError(
            f"--overwrite has no effect with --only-write-{product}; name a new folder with --out",
            code="unused-option",
        )
    with open_folder(config.command, folder_options, inputs) as folder:
        extra_options, _, notes = drop_unnamed(config.outs, request.given, folder.path, resume_point)
        extra_outputs = ExtraOutputs(extra_options)
        if is_temporary := bool(extra_outputs.newest and not (folder_options.out or folder_options.resume)):
            folder.replace_run()  # it exists only while the result is written
        interrupts.on_exit = folder.undo
        with interrupts:
            try:
                config, peft, peft_notes = resolve_peft_folder(config, inputs, folder, request)
                trainable = choose_trainable(config, model, inputs, peft)
                notes += [*peft_notes, *trainable.notes()]
                for line in notes:
                    log_line(f"note: {line}")
                if extra_options.files_by_option:
                    inputs_read = input_files(
                        replace(config, files=(), data=DataOptions()), inputs, folder_options.config
                    )
                    check_extra_outputs(extra_options, folder.path, inputs_read, resume_point, folder_options)
                write_result(resume_point, trainable, folder, extra_outputs)
            finally:
                folder.undo()
    if is_temporary:
        with suppress(OSError):  # it has other entries
            folder.path.parent.rmdir()
    files = (
        extra_outputs.newest if is_temporary else [folder.path / trainable.result_name, *extra_outputs.newest]
    )
    log_end(product, files, StopReason(DONE))
    return RunResult(
        stop=StopReason(DONE),
        folder=folder.path,
        result=files[0],
        steps=resume_point.step,
        seconds=resume_point.checkpoint.state.counters.seconds,
        notes=tuple(notes),
    )


def write_result(
    resume_point: ResumePoint, trainable: Trainable, folder: RunFolder, extra_outputs: ExtraOutputs
) -> None:
    """Write the result of a checkpoint as it is."""
    names = trainable.make_weights("off").trainable
    check_weights(resume_point, names)
    with verify_unchanged(resume_point.checkpoint.files):
        parts = {name: np.array(resume_point.checkpoint.weights[name]) for name in names}
    trainable.write_result(folder.result_path(trainable.result_name), parts)
    extra_outputs.write(resume_point.step, resume_point.path, folder.result_path(trainable.result_name))
    trainable.write_extra(parts)


def checkpoint_to_write(inputs: RunInputs, folder_options: RunFolderOptions) -> tuple[ResumePoint, str]:
    """Return the checkpoint, and "model" or "adapter", whichever is to be written."""
    resume_point = inputs.resume_point
    option, product = (
        ("only_write_model", "model") if folder_options.only_write_model else ("only_write_lora", "adapter")
    )
    if resume_point is None:
        raise UsageError(
            f"{format_flag(option)} needs a checkpoint (got the model {folder_options.checkpoint_in})",
            code="no-checkpoint",
        )
    if resume_point.checkpoint.kind != (
        "train_model" if folder_options.only_write_model else "finetune_lora"
    ):
        other = format_flag("only_write_lora" if folder_options.only_write_model else "only_write_model")
        raise UsageError(
            f"{format_flag(option)}: the run of {resume_point.path} makes no {product}; use {other}",
            code="wrong-checkpoint",
        )
    return resume_point, product
