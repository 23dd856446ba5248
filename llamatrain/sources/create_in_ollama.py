"""Creates models in Ollama: writes a Modelfile and calls `ollama create`.

A model in Ollama's store is named in the Modelfile as Ollama names it, so that its template and parameters hold for
the new model too. Ollama chooses a template by that in the GGUF file otherwise.
"""

import shlex
import shutil
import subprocess
from pathlib import Path

from llamatrain.config.messages import LINE, shorten
from llamatrain.config.remote_names import remote_name
from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.terminal import log_if_slow, log_line
from llamatrain.sources.names import locate_model

TIMEOUT = 1800.0  # seconds, in which Ollama copies the model


def create_in_ollama(name: str, modelfile: Path, model: str | Path, adapter: Path | None = None) -> str:
    """Write a Modelfile and call `ollama create`; return what was done, or why it failed and what to do.

    A run has its result by then, so failures of Ollama do not end it with an error.
    """
    with AtomicFile(modelfile) as file:
        file.write(modelfile_text(model, adapter).encode())
    command = ["ollama", "create", name, "-f", str(modelfile)]
    program = shutil.which("ollama")
    if program is None:
        note = f"ollama is not installed here; where it is, run: {shlex.join(command)}"
    elif problem := call([program, *command[1:]]):
        note = f"ollama create failed: {problem}; to repeat it, run: {shlex.join(command)}"
    else:
        note = f"created in Ollama; use it with: ollama run {name}"
    log_line(f"note: {note}")
    return note


def modelfile_text(model: str | Path, adapter: Path | None) -> str:
    """Return the text of a Modelfile for a model and an adapter."""
    name = remote_name(model)
    base = (
        name.removeprefix("ollama:")
        if name and name.startswith("ollama:")
        else str(locate_model(model).absolute())
    )
    lines = [f"FROM {base}", *([f"ADAPTER {adapter.absolute()}"] if adapter else [])]
    for line in lines:
        if not line.isprintable():
            raise FileError(
                f"{line!r}: a path in a Modelfile must be printable; rename the file", code="invalid-path"
            )
    return "\n".join(lines) + "\n"


def call(command: list[str]) -> str:
    """Run a command, and return its error in one line, or an empty text."""
    try:
        with log_if_slow(f"running {shlex.join(command)}"):
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False
            )
    except subprocess.TimeoutExpired:
        return f"it did not end within {TIMEOUT:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    if not done.returncode:
        return ""
    output = (done.stderr or done.stdout).decode("utf-8", "replace")
    words = [line.strip() for line in output.replace("\r", "\n").splitlines() if line.strip()]
    return shorten(words[-1] if words else f"exit code {done.returncode}", LINE)
