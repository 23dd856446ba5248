"""Names of models in Ollama."""

import re
from dataclasses import dataclass
from pathlib import Path

from llamatrain.config.messages import quote
from llamatrain.errors import UsageError

REGISTRY, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")


@dataclass(frozen=True)
class OllamaName:
    """The name of a model in Ollama."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> "OllamaName":
        """Parse [HOST/][NAMESPACE/]MODEL[:TAG], with Ollama's defaults."""
        parts = text.split("/")
        model, colon, tag = parts[-1].partition(":")
        host, namespace = REGISTRY, NAMESPACE
        if len(parts) == 2:
            namespace = parts[0]
        elif len(parts) == 3:
            host, namespace = parts[:2]
        name = cls(host, namespace, model, tag if colon else TAG)
        if (
            len(parts) > 3
            or not HOST.fullmatch(host)
            or not all(PART.fullmatch(part) for part in (namespace, model, name.tag))
        ):
            raise UsageError(
                f"invalid name of a model in Ollama (got {quote(text)}); write ollama:MODEL, ollama:MODEL:TAG or "
                "ollama:NAMESPACE/MODEL:TAG, as `ollama list` shows it",
                code="invalid-name",
            )
        return name

    @property
    def manifest(self) -> Path:
        """The path of its manifest in the folder of manifests."""
        return Path(self.host, self.namespace, self.model, self.tag)

    def __str__(self) -> str:
        parts = [self.host] * (self.host != REGISTRY)
        parts += [self.namespace] * (bool(parts) or self.namespace != NAMESPACE)
        return f"ollama:{'/'.join([*parts, self.model])}:{self.tag}"
