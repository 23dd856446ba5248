"""Opens the folder of a run, and removes what does not belong to the run."""

import os
from pathlib import Path

from llamatrain.checkpoints.filenames import numbered_checkpoints
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.errors import UsageError
from llamatrain.run.inputs import RunInputs
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.prepare import PreparedRun, input_files


def open_folder(command: str, folder_options: RunFolderOptions, inputs: RunInputs) -> RunFolder:
    """Return a new folder, or that of the run that is resumed."""
    run_folder = inputs.folder if folder_options.resume else None
    if run_folder is None or (
        folder_options.out and os.path.realpath(folder_options.out) != os.path.realpath(run_folder)
    ):
        return RunFolder.create(folder_options.out, command, folder_options.overwrite)
    assert folder_options.resume
    if folder_options.resume.is_file() and any(
        later > inputs.step for later in numbered_checkpoints(run_folder)
    ):
        raise UsageError(
            f"{folder_options.resume}: its folder holds later checkpoints; use --resume {run_folder} "
            "for the newest one, or --out for a new run",
            code="later-checkpoints",
        )
    return RunFolder(run_folder)


def prepare_folder(prepared: PreparedRun, folder: RunFolder, config: Path | None) -> None:
    """Remove what does not belong to the run.

    These are files of a replaced run, or checkpoints later than the resumed one.
    """
    if folder.path == prepared.inputs.folder:
        folder.rewind(prepared.inputs.step)  # past those that are damaged
    else:
        folder.replace_run(input_files(prepared.config, prepared.inputs, config))
