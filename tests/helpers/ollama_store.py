"""Ollama's store of models, built from its documented layout."""

import hashlib
import json
from pathlib import Path
from typing import Any

LAYER = "application/vnd.ollama.image."


def add_blob(store: Path, content: bytes) -> str:
    """Write a blob, and return its digest."""
    digest = hashlib.sha256(content).hexdigest()
    blob = store / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    return f"sha256:{digest}"


def add_manifest(store: Path, layers: Any, name: str = "registry.ollama.ai/library/tiny/latest") -> Path:
    """Write a manifest with layers."""
    path = store / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return path


def add_model(
    store: Path, layers: dict[str, bytes], name: str = "registry.ollama.ai/library/tiny/latest"
) -> Path:
    """Write a model with the contents of its layers by kind, and return its manifest."""
    listed = [
        {"mediaType": LAYER + kind, "digest": add_blob(store, content), "size": len(content)}
        for kind, content in layers.items()
    ]
    return add_manifest(store, listed, name)
