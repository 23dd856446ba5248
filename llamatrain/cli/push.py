"""`llamatrain push`: uploads a run's result to Hugging Face."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.push import PushOptions, push
from llamatrain.config.options import build
from llamatrain.config.units import Size

command = make_app()


@command.command("push", cls=Command)
@with_options(PushOptions)
def push_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=parse_path)],
    repository: Annotated[str, typer.Argument(metavar="hf:OWNER/NAME")],
    **overrides: Any,
) -> None:
    """Upload the result of RUN, a run's folder or a GGUF file, to a repository on Hugging Face.

    An adapter is uploaded as GGUF and in PEFT's format, with a model card that describes the run. Files of the same
    names are replaced by a new commit. It needs huggingface_hub: pip install "llamatrain[hub]" installs it.
    """
    pushed = push(run, repository, build(PushOptions, overrides))
    for name, size in pushed.files.items():
        print(f"{name}  {Size(size).text}")
    print(f"{'uploaded to' if pushed.uploaded else 'nothing was uploaded to'} {pushed.url}")
