"""Uploads the result of a run to Hugging Face: the GGUF file, an adapter also in PEFT's format, and a model card.

The card has no paths of this machine, and no texts that may be private, such as prompts and notes.
"""

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.messages import quote
from llamatrain.config.options import Option, Options
from llamatrain.config.remote_names import remote_name
from llamatrain.config.units import Size
from llamatrain.errors import FileError, LlamatrainError, MissingError, UsageError
from llamatrain.platform.terminal import log_if_slow, log_line

if TYPE_CHECKING:
    from llamatrain.gguf.reader import Gguf
    from llamatrain.sources.hub import HubName

RESULTS = ("best.gguf", "adapter.gguf", "model.gguf")  # of a run, the best first
# Options that the card shows, in this order: numbers and words only, as texts and paths may be private.
SHOWN = (
    *("objective", "full", "lora-r", "lora-alpha", "lora-dropout", "quant-aware", "ctx", "batch", "grad-acc"),
    *("iters", "epochs", "optimizer", "lr", "schedule", "warmup", "weight-decay", "seed"),
)

LOCAL = "a local file"
# A name on Hugging Face or in Ollama without characters that Markdown or a shell would interpret.
PUBLIC = re.compile(r"(hf|ollama):[\w./:@+-]+")
TASKS = {"contrastive": "sentence-similarity", "rerank": "text-ranking"}  # Hugging Face's, by objective


@dataclass(frozen=True)
class PushOptions(Options, panel="The repository"):
    """Options of `push`."""

    private: Annotated[bool, Option("Create a private repository; an existing one must be private.")] = False
    base: Annotated[
        Path | None,
        Option("The base of an adapter, if it is not the one that the run names.", unit="MODEL"),
    ] = None
    dry_run: Annotated[
        Path | None,
        Option("Write the files into this folder, which must not exist, and upload nothing.", unit="FOLDER"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The files that were uploaded, or would be."""

    url: str  # of the repository
    files: dict[str, int]  # names and sizes
    uploaded: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The file to upload, and what is known about its run."""

    gguf: "Gguf"
    options: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]

    @property
    def is_adapter(self) -> bool:
        """True for an adapter, False for a model."""
        return self.gguf.kind == "adapter"

    @property
    def filename(self) -> str:
        """The name of the file in the repository."""
        return "adapter.gguf" if self.is_adapter else "model.gguf"


def push(run: Path, repository: str, options: PushOptions) -> Pushed:
    """Upload a run's result, or a file, to a repository `hf:OWNER/NAME`; create it if it does not exist."""
    name = parse_repository(repository)
    result = read_result(run)
    base = options.base or result.options.get("base")
    notes = list[str]()
    with tempfile.TemporaryDirectory(prefix="llamatrain-push-") as temporary:
        folder = Path(temporary)
        files = {result.filename: result.gguf.path}
        if result.is_adapter:
            try:
                files |= write_peft(result, base, folder)
            except LlamatrainError as error:
                notes.append(f"the adapter is not uploaded in PEFT's format: {error}")
                log_line(f"note: {notes[-1]}")
        card = folder / "README.md"
        card.write_text(
            write_card(result, base, name.repository, "adapter_config.json" in files), encoding="utf-8"
        )
        files[card.name] = card
        sizes = {file: path.stat().st_size for file, path in files.items()}
        if options.dry_run:
            copy_files(files, options.dry_run)
        else:
            upload(name, files, options.private)
    return Pushed(url=name.page, files=sizes, uploaded=not options.dry_run, notes=tuple(notes))


def parse_repository(text: str) -> "HubName":
    """Return the name of a repository for models, without a file or a revision."""
    from llamatrain.sources.hub import HubName

    name = HubName.parse(text) if text.startswith("hf:") else None
    if name is None or name.is_data or name.file or name.type or name.revision:
        raise UsageError(f"the repository must be hf:OWNER/NAME (got {quote(text)})", code="invalid-name")
    return name


def read_result(run: Path) -> Result:
    """Return the result in a run's folder, or a file alone."""
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.report.metrics import read_lines
    from llamatrain.report.run_data import CONFIG, METRICS, read_options

    if not run.exists():
        raise MissingError(f"{run}: no such run; give its folder, or a GGUF file", code="no-such-file")
    file = run
    if run.is_dir():
        found = next((run / each for each in RESULTS if (run / each).is_file()), None)
        if found is None:
            raise FileError(f"{run}: the folder has no result ({', '.join(RESULTS)})", code="no-result")
        file = found
    gguf = open_gguf(file)
    if gguf.kind not in ("adapter", "model"):
        raise FileError(
            f"{file}: a model or an adapter is needed (got a file of kind {gguf.kind})", code="wrong-kind"
        )
    folder = file.parent
    if file.name not in RESULTS:  # what else is in its folder may be about another file
        return Result(gguf=gguf, options={}, metrics=())
    options, _ = read_options(folder / CONFIG)
    metrics = tuple(line for _, line in read_lines(folder / METRICS))
    return Result(gguf=gguf, options=options, metrics=metrics)


def write_peft(result: Result, base: Any, folder: Path) -> dict[str, Path]:
    """Write an adapter in PEFT's format, and return its files."""
    from llamatrain.adapters import peft
    from llamatrain.commands.export import combine_adapters
    from llamatrain.commands.merge_adapters import open_base

    if not base:
        raise UsageError("its base is not known; name it with --base", code="no-model")
    _, h, adapters = open_base(Path(base), AdapterOptions(lora=(result.gguf.path,)))
    target = folder / "peft"
    peft.write_peft(target, combine_adapters(adapters), base_model(base), h)
    return {name: target / name for name in (peft.CONFIG, peft.WEIGHTS)}


# ---- the card --------------------------------------------------------------


def base_model(base: Any) -> str:
    """Return the repository of a base on Hugging Face, or an empty text."""
    from llamatrain.sources.hub import HubName

    name = remote_name(str(base)) if base else None
    return HubName.parse(name).repository if name and name.startswith("hf:") else ""


def write_card(result: Result, base: Any, repository: str, has_peft: bool) -> str:
    """Return the model card: Markdown behind the facts that Hugging Face reads."""
    kind = "A LoRA adapter" if result.is_adapter else "A model"
    lines = [
        "---",
        *front_matter(result, base_model(base), has_peft),
        "---",
        "",
        f"# {repository.rpartition('/')[2]}",
        "",
        f"{kind} in GGUF, made with llamatrain. **License: to be stated here; that of the base and of the data hold.**",
        "",
        *usage(result, base, repository, has_peft),
    ]
    if facts := list(describe_run(result, base)):
        lines += [
            "",
            "## Training",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {fact} |" for name, fact in facts),
        ]
        lines += ["", "```sh", command(result), "```"]
    return "\n".join(lines) + "\n"


def front_matter(result: Result, base: str, has_peft: bool) -> Iterator[str]:
    """Yield the lines of YAML. JSON strings are strings there, too."""
    if base:
        yield f"base_model: {json.dumps(base)}"
        yield f"base_model_relation: {'adapter' if result.is_adapter else 'finetune'}"
    if has_peft:
        yield "library_name: peft"
    yield f"pipeline_tag: {TASKS.get(str(result.options.get('objective')), 'text-generation')}"
    yield "tags:"
    yield from (f"- {tag}" for tag in (*(["lora"] * result.is_adapter), "gguf", "llamatrain"))


def usage(result: Result, base: Any, repository: str, has_peft: bool) -> Iterator[str]:
    """Yield lines that show how to use the files."""
    model = public_name(base)
    yield "```sh"
    if result.is_adapter:
        yield f"llamatrain generate {'BASE.gguf' if model == LOCAL else model} --lora hf:{repository}/{result.filename} --prompt TEXT"
        yield f"llama-server -m BASE.gguf --lora {result.filename}"
    else:
        yield f"llamatrain generate hf:{repository} --prompt TEXT"
        yield f"llama-server -m {result.filename}"
    yield "```"
    if has_peft:
        yield ""
        yield f'PEFT loads it with `PeftModel.from_pretrained(model, "{repository}")`.'


def describe_run(result: Result, base: Any) -> Iterator[tuple[str, str]]:
    """Yield names and values of what is known about the run."""
    if not result.options:
        return
    if base:
        yield "base", f"`{public_name(base)}`"
    data = result.options.get("data")
    if isinstance(data, list) and data:
        yield "data", ", ".join(f"`{name}`" for name in dict.fromkeys(map(public_name, data)))
    for name, value in shown_options(result.options):
        yield name, str(value)
    losses = [line["loss"] for line in result.metrics if isinstance(line.get("loss"), float)]
    scores = [line["val_loss"] for line in result.metrics if isinstance(line.get("val_loss"), float)]
    if losses:
        yield "training loss, first and last", f"{losses[0]:.4g}, {losses[-1]:.4g}"
    if scores:
        yield "validation loss, lowest", f"{min(scores):.4g}"


def public_name(name: Any) -> str:
    """Return how a card names a model or data: the name on Hugging Face or in Ollama, or that it is a local file."""
    remote = remote_name(str(name))
    return remote if remote and PUBLIC.fullmatch(remote) else LOCAL


def shown_options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options that a card shows."""
    for name in SHOWN:
        value = options.get(name)
        if value is False:
            continue
        if isinstance(value, int | float) or (
            isinstance(value, str) and value.replace("-", "").replace("_", "").isalnum()
        ):
            yield name, value


def command(result: Result) -> str:
    """Return a command that trains like the run, with words in place of local files."""
    options = result.options
    finetunes = bool(options.get("base"))
    words = ["llamatrain", "finetune" if finetunes else "from-scratch"]
    if finetunes:
        name = public_name(options["base"])
        words.append("BASE.gguf" if name == LOCAL else name)
    words.append("DATA")
    for name, value in shown_options(options):
        if isinstance(value, bool):
            words += [f"--{name}"] * value
        else:
            words += [f"--{name}", f"{value}"]
    return shlex.join(words)


# ---- the upload ------------------------------------------------------------


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the files into a new folder."""
    try:
        folder.mkdir(parents=True)
        for name, path in files.items():
            shutil.copyfile(path, folder / name)
    except FileExistsError:
        raise FileError(f"{folder} exists; name another folder for --dry-run", code="output-exists") from None
    except OSError as error:
        raise FileError(f"{folder}: {error.strerror}", code="write-failed") from error


def upload(name: "HubName", files: Mapping[str, Path], private: bool) -> None:
    """Create the repository if it does not exist, and add the files as one commit."""
    from llamatrain.sources.hub import check_installed, translate_hub_errors

    check_installed(name)
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if not get_token():
        raise UsageError(
            f"{name}: no token for Hugging Face; log in with `hf auth login`, or set HF_TOKEN",
            code="no-token",
        )
    total = Size(sum(path.stat().st_size for path in files.values())).text
    with translate_hub_errors(name), log_if_slow(f"uploading {total} to {name.page}"):
        api = HfApi()
        api.create_repo(repo_id=name.repository, private=private or None, exist_ok=True)
        if private and not api.repo_info(name.repository).private:
            raise FileError(
                f"{name}: the repository exists and is public; name another one", code="public-repository"
            )
        additions = [
            CommitOperationAdd(path_in_repo=file, path_or_fileobj=path) for file, path in files.items()
        ]
        api.create_commit(name.repository, additions, commit_message="Upload with llamatrain")
