"""Downloads files of Hugging Face repositories through `huggingface_hub`, into its own cache.

    hf:OWNER/NAME[/FILE][@REVISION]       a model: its GGUF file
    hf:OWNER/NAME:TYPE[@REVISION]         the GGUF file of a type, such as Q4_K_M
    hf:datasets/OWNER/NAME/FILE           a file of a dataset

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE hold as they do there.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.config.messages import quote, shorten_line
from llamatrain.config.remote_names import Use
from llamatrain.errors import FileError, LlamatrainError, MissingError, UsageError
from llamatrain.extensions import load_extensions
from llamatrain.platform.terminal import log_line, progress_bar
from llamatrain.sources.checksums import verify

PREFERRED = (
    "Q4_K_M",
    "Q4_K_S",
    "Q4_0",
    "Q5_K_M",
    "Q6_K",
    "Q8_0",
    "BF16",
    "F16",
)  # of several files, in order
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
NAME = re.compile(
    r"(?P<data>datasets/)?(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<type>[\w.-]+)|/(?P<file>[^@]+))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
OTHER_GGUF = ("mmproj", "imatrix")  # of a vision encoder, and importance matrices
MODEL_FOLDER = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
INSTALL = 'pip install "llamatrain[hub]"'
TIMEOUT = 10.0  # seconds to list the files of a repository
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class HubName:
    """The name of a repository, a file in it or a type of its files, and a revision."""

    repository: str
    is_data: bool
    type: str | None
    file: str | None
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubName":
        """Parse a name behind its `hf:`."""
        match = NAME.fullmatch(text.removeprefix("hf:"))
        if (
            not match
            or (match["file"] and not is_safe_file(match["file"]))
            or (match["revision"] and not is_safe_file(match["revision"]))
            or (match["data"] and match["type"])
        ):
            raise UsageError(
                f"invalid name on Hugging Face (got {quote(text)}); write hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M, "
                "hf:OWNER/NAME/FILE.gguf or hf:datasets/OWNER/NAME/FILE, and @REVISION behind it",
                code="invalid-name",
            )
        return cls(match["repository"], bool(match["data"]), match["type"], match["file"], match["revision"])

    @property
    def settings(self) -> dict[str, Any]:
        """The repository as huggingface_hub takes it."""
        return {
            "repo_id": self.repository,
            "repo_type": "dataset" if self.is_data else "model",
            "revision": self.revision,
        }

    @property
    def page(self) -> str:
        """The address of its page."""
        return f"https://huggingface.co/{'datasets/' * self.is_data}{self.repository}"

    def __str__(self) -> str:
        part = f":{self.type}" if self.type else f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{'datasets/' * self.is_data}{self.repository}{part}{revision}"


def fetch(text: str, use: Use) -> Path:
    """Return the local file of a name, or the folder of an adapter of PEFT's or of a model to convert."""
    name = HubName.parse(text)
    if (use == "data") != name.is_data:
        kind = (
            "a dataset, and no model"
            if name.is_data
            else "a model; write hf:datasets/OWNER/NAME/FILE for data"
        )
        raise UsageError(f"{name}: this is {kind}", code="wrong-kind")
    check_installed(name)
    with translate_hub_errors(name):
        files = [name.file] if name.file else list_files(name)
        if use == "adapter" and not name.file and set(PEFT_FILES) <= {*files}:
            return download_files(name, list(PEFT_FILES))[0].parent
        if use == "model" and not any(file.endswith(".gguf") for file in files):
            return fetch_model_folder(name, files)
        chosen = name.file or choose_gguf(name, files)
        return download_files(name, expand_parts(chosen))[0]


def check_installed(name: HubName) -> None:
    """Raise if huggingface_hub is not installed."""
    try:
        from huggingface_hub.utils import logging
    except ImportError:
        raise UsageError(
            f"{name}: a package for Hugging Face is not installed; {INSTALL} installs it",
            code="missing-package",
        ) from None
    logging.set_verbosity_error()  # its warnings would stand between ours


def list_files(name: HubName) -> list[str]:
    """Return the names of the files in a repository; without a network, of those in the cache."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if not constants.HF_HUB_OFFLINE:
        try:
            siblings = HfApi().repo_info(**name.settings, timeout=TIMEOUT).siblings
            return sorted(file for sibling in siblings or () if is_safe_file(file := sibling.rfilename))
        except HfHubHTTPError:
            raise
        except connection_errors():
            pass
    folder = Path(snapshot_download(**name.settings, local_files_only=True))
    log_line(
        f"note: {name}: using the files in {folder}, since Hugging Face is not asked or cannot be reached"
    )
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_safe_file(file: str) -> bool:
    """Return True if a name from a user or a server is printable and stays inside a folder, also on Windows."""
    parts = file.split("/")
    return file.isprintable() and not {"", ".", ".."} & {*parts} and "\\" not in file and ":" not in parts[0]


def choose_gguf(name: HubName, files: Sequence[str]) -> str:
    """Return the GGUF file of a repository: the only one, that of the type, or the first in order of preference."""
    models = [file for file in files if file.endswith(".gguf") and is_first_part(file) and not is_other(file)]
    if name.is_data or not models:
        raise MissingError(f"{name}: name a file ({list_some(files)})", code="no-file-named")
    if len(models) == 1 and not name.type:
        return models[0]
    for kind in [name.type] if name.type else PREFERRED:
        found = [file for file in models if kind and has_type(file, kind)]
        if len(found) == 1:
            if not name.type:
                log_line(
                    f"note: {name}: using {found[0]}, one of {len(models)} GGUF files; name another like "
                    f"hf:{name.repository}:Q8_0"
                )
            return found[0]
    raise MissingError(f"{name}: name one of its GGUF files ({list_some(models)})", code="no-file-named")


def is_first_part(file: str) -> bool:
    """Return True for a whole model or the first part of a split one."""
    part = PART.fullmatch(file)
    return not part or int(part[2]) == 1


def is_other(file: str) -> bool:
    """Return True for GGUF files that hold no language model."""
    return any(word in file.rpartition("/")[2].lower() for word in OTHER_GGUF)


def has_type(file: str, kind: str) -> bool:
    """Return True if the name of a file has a type as one of its words."""
    return re.search(rf"(?<![a-z0-9_]){re.escape(kind.lower())}(?![a-z0-9_])", file.lower()) is not None


def list_some(files: Sequence[str]) -> str:
    """List files for a message."""
    return shorten_line(", ".join(files)) or "it has none"


def expand_parts(file: str) -> list[str]:
    """Return all parts of a split model, the named one first, or the file itself."""
    part = PART.fullmatch(file)
    if not part or int(part[3]) > 1000:
        return [file]
    names = [f"{part[1]}-{number + 1:05}-of-{part[3]}.gguf" for number in range(int(part[3]))]
    return [file, *(name for name in names if name != file)]


def fetch_model_folder(name: HubName, files: Sequence[str]) -> Path:
    """Return the folder of a model in safetensors, if such folders can be converted."""
    from fnmatch import fnmatch

    wanted = [file for file in files if "/" not in file and any(fnmatch(file, each) for each in MODEL_FOLDER)]
    has_weights = any(file.endswith(".safetensors") for file in wanted)
    if not name.type and "config.json" in files and has_weights and load_extensions("model_folders"):
        return download_files(name, sorted(wanted))[0].parent
    raise MissingError(
        f"{name}: the repository has no GGUF file ({list_some(files)}); look for {name.repository}-GGUF or similar",
        code="no-gguf",
    )


def download_files(name: HubName, files: Sequence[str]) -> list[Path]:
    """Return the local paths of files of a repository, after comparing their checksums."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    paths = []
    for file in files:
        known = try_to_load_from_cache(
            name.repository, file, repo_type=name.settings["repo_type"], revision=name.revision
        )
        if not isinstance(known, str):
            log_line(f"downloading {file} of {name.page}")
        path = Path(hf_hub_download(filename=file, **name.settings, tqdm_class=HubBar))
        blob = path.resolve()
        if SHA256.fullmatch(blob.name):  # what is stored by its checksum; small files have one of git's
            try:
                verify(blob, blob.name, str(name))
            except FileError:
                blob.unlink()
                path.unlink(missing_ok=True)
                raise
        paths.append(path)
    return paths


class HubBar:
    """A progress bar as huggingface_hub uses tqdm's, drawn like those of other long work."""

    def __init__(
        self, *_: object, total: float | None = None, initial: float = 0, desc: str = "", **__: object
    ) -> None:
        whole = None if total is None else int(total)
        self._bar = progress_bar(desc or "downloading", total=whole, unit="B", unit_scale=True)
        self.total, self.n = total, initial
        self._bar.__enter__()
        self._bar.update(int(initial))

    def update(self, count: float = 1) -> None:
        """Count bytes."""
        self.n += count
        self._bar.update(int(count))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.__exit__(None, None, None)

    def __enter__(self) -> "HubBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refresh(self, *_: object, **__: object) -> None:
        """Do nothing: the bar refreshes itself."""

    set_description = set_postfix_str = reset = refresh
    update_transfer = set_transfer_postfix_str = refresh  # of bytes on the network, which need no second bar


def connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a network that fails. The first is also the base of the errors of a server."""
    from huggingface_hub.errors import HTTPError

    return HTTPError, ConnectionError, TimeoutError


@contextmanager
def translate_hub_errors(name: HubName) -> Iterator[None]:
    """Turn errors of huggingface_hub into ones that say in one line what to do."""
    from huggingface_hub import errors

    try:
        yield
    except LlamatrainError:
        raise
    except errors.GatedRepoError:
        raise FileError(
            f"{name}: access is granted to those who accept its licence; accept it at {name.page}, and log in with "
            "`hf auth login`",
            code="gated",
        ) from None
    except errors.RepositoryNotFoundError:
        raise MissingError(
            f"{name}: no such repository, or a private one; check the name at {name.page}, or log in with "
            "`hf auth login`",
            code="no-such-repository",
        ) from None
    except errors.RevisionNotFoundError:
        raise MissingError(
            f"{name}: no such revision; the page {name.page}/tree/main lists them", code="no-such-revision"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise FileError(
            f"{name}: not in the cache, and Hugging Face {describe_network(error)}", code="not-cached"
        ) from None
    except errors.EntryNotFoundError:
        raise MissingError(
            f"{name}: no such file; {name.page}/tree/main lists them", code="no-such-file"
        ) from None
    except errors.HFValidationError:
        raise UsageError(
            f"{name}: invalid name of a repository; write hf:OWNER/NAME", code="invalid-name"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        advice = "log in with `hf auth login`" if status in (401, 403) else "repeat the command later"
        raise FileError(f"{name}: Hugging Face reports HTTP {status}; {advice}", code="hub-failed") from None
    except ValueError as error:  # such as a token that is not ASCII, whose text must not be repeated
        raise FileError(
            f"{name}: Hugging Face's answer, HF_TOKEN or HF_ENDPOINT is invalid ({type(error).__name__}); check "
            "them, and repeat the command",
            code="hub-failed",
        ) from None
    except connection_errors() as error:
        detail = " ".join(str(error).split())[:200]
        raise FileError(
            f"{name}: the transfer was cut ({detail}); repeat the command", code="download-failed"
        ) from None


def describe_network(error: Exception) -> str:
    """Return why Hugging Face was not asked."""
    from huggingface_hub import constants

    return "is not asked, since HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "cannot be reached"
