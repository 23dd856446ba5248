"""Reads Ollama's store of models: a manifest per tag, which lists layers, and a blob per layer.

    manifests/HOST/NAMESPACE/MODEL/TAG      JSON
    blobs/sha256-<64 hexadecimal digits>    the content of a layer

The store is only read. It may belong to another user, so it is not trusted: names cannot lead out of it, sizes and
checksums are compared, and small files are read with a limit.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.config.messages import quote, suggest
from llamatrain.config.read_limited import read_limited
from llamatrain.config.remote_names import Use
from llamatrain.errors import FileError, MissingError, UsageError, wrap_os_errors
from llamatrain.platform.terminal import log_line
from llamatrain.sources.checksums import verify
from llamatrain.sources.ollama_name import OllamaName

SYSTEM_STORE = Path("/usr/share/ollama/.ollama/models")  # of the service that Ollama's installer sets up
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
MEDIA_TYPE = "application/vnd.ollama.image."
MAX_MANIFEST = 1 << 20  # bytes; a manifest has about 1,000
MAX_TEXT = 1 << 22  # bytes of a template, parameters or a licence


@dataclass(frozen=True)
class OllamaModel:
    """A model in Ollama's store: its layers by kind, such as "model", "adapter", "template" and "params"."""

    name: OllamaName
    store: Path
    layers: tuple[tuple[str, str, int], ...]  # kinds, checksums and sizes

    def find(self, kind: str) -> list[Path]:
        """Return the blobs of a kind, after comparing their sizes and checksums."""
        with wrap_os_errors(self.store, "Ollama's models cannot be read"):
            return [self._check_blob(digest, size) for layer, digest, size in self.layers if layer == kind]

    def read_text(self, kind: str) -> str:
        """Return the text of the layers of a kind."""
        raw = (read_limited(path, MAX_TEXT, f"the {kind} of {self.name}") for path in self.find(kind))
        return "".join(text.decode("utf-8", "replace") for text in raw)

    def _check_blob(self, digest: str, size: int) -> Path:
        path = stay_inside(self.store / "blobs", Path(f"sha256-{digest}"), self.name)
        if not path.is_file():
            raise FileError(
                f"{self.name}: the blob {path} is missing; repeat `ollama pull {str(self.name)[7:]}`",
                code="missing-blob",
            )
        if (found := path.stat().st_size) != size:
            raise FileError(
                f"{self.name}: the blob {path} has {found:,} bytes, but the manifest states {size:,}; repeat "
                f"`ollama pull {str(self.name)[7:]}`",
                code="wrong-size",
            )
        verify(path, digest, str(self.name))
        return path


def find_layer(text: str, use: Use) -> Path:
    """Return the GGUF file of a model or an adapter in Ollama's store."""
    if use == "data":
        raise UsageError(f"{text}: Ollama has models, and no data; name a file", code="not-data")
    model = read_model(text)
    found = model.find(use)
    if len(found) == 1:
        if use == "model" and any(kind == "adapter" for kind, _, _ in model.layers):
            log_line(f"note: {model.name} also has an adapter, which --lora {model.name} adds")
        return found[0]
    kinds = ", ".join(sorted({kind for kind, _, _ in model.layers})) or "none"
    raise FileError(
        f"{model.name}: one GGUF file of a{'n' * (use == 'adapter')} {use} is needed (got {len(found)}; the "
        f"layers of this model are: {kinds})",
        code="no-such-layer",
    )


def read_model(text: str) -> OllamaModel:
    """Read the manifest of a model that is named `ollama:...`."""
    name = OllamaName.parse(text.removeprefix("ollama:"))
    folders = list(stores())
    for store in folders:
        with wrap_os_errors(store, "Ollama's models cannot be read"):
            if manifest := find_manifest(store, name):
                return OllamaModel(name, store, parse_manifest(manifest, name))
    known = sorted({str(each) for store in folders for each in list_names(store)})
    places = " or ".join(map(str, folders))
    raise MissingError(
        f"{name}: no such model in {places}{suggest(str(name), known)}; `ollama pull {str(name)[7:]}` "
        "downloads it, OLLAMA_MODELS names another folder",
        code="no-such-model",
    )


def find_manifest(store: Path, name: OllamaName) -> Path | None:
    """Return the manifest of a model in a store, or None."""
    path = stay_inside(store / "manifests", name.manifest, name)
    if path.is_dir():
        raise FileError(
            f"{name}: {path} is a folder, and no manifest; name a model as `ollama list` shows it",
            code="not-a-file",
        )
    return path if path.exists() else None


def stores() -> Iterator[Path]:
    """Yield the folders in which Ollama may keep its models."""
    if named := os.environ.get("OLLAMA_MODELS"):
        yield Path(named)
        return
    with suppress(RuntimeError):  # no home
        yield Path.home() / ".ollama" / "models"
    yield SYSTEM_STORE


def list_names(store: Path) -> Iterator[OllamaName]:
    """Yield the names of the models in a store."""
    root = store / "manifests"
    with suppress(OSError):
        for path in root.glob("*/*/*/*"):
            yield OllamaName(*path.relative_to(root).parts)


def stay_inside(folder: Path, path: Path, name: OllamaName) -> Path:
    """Return a path in a folder; raise FileError if a link leads out of the folder."""
    joined = folder / path
    if not Path(os.path.realpath(joined)).is_relative_to(os.path.realpath(folder)):
        raise FileError(f"{name}: {joined} is a link that leads out of {folder}", code="link-outside")
    return joined


def parse_manifest(path: Path, name: OllamaName) -> tuple[tuple[str, str, int], ...]:
    """Return the kinds, checksums and sizes of the layers in a manifest."""
    raw = read_limited(path, MAX_MANIFEST, "a manifest of Ollama's")
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        raise FileError(f"{name}: {path} is no manifest: it is not JSON", code="damaged-manifest") from None
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    if not isinstance(layers, list):
        raise FileError(f"{name}: {path} is no manifest: it has no layers", code="damaged-manifest")
    return tuple(parse_layer(layer, path, name) for layer in layers)


def parse_layer(layer: Any, path: Path, name: OllamaName) -> tuple[str, str, int]:
    """Return the kind, checksum and size of a layer."""
    fields = layer if isinstance(layer, dict) else {}
    kind, digest, size = fields.get("mediaType"), fields.get("digest"), fields.get("size")
    match = DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if not (isinstance(kind, str) and match and type(size) is int and size >= 0):
        raise FileError(
            f"{name}: {path} has a layer without a valid type, digest and size (got {quote(kind)}, "
            f"{quote(digest)}, {quote(size)})",
            code="damaged-manifest",
        )
    return kind.removeprefix(MEDIA_TYPE), match[1], size
