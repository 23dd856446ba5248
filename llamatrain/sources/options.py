"""Options about other programs' models."""

from llamatrain.config.options import Option
from llamatrain.errors import UsageError
from llamatrain.sources.ollama_name import OllamaName


def is_name(text: str) -> bool:
    """Return True if Ollama accepts a name for a new model."""
    try:
        return bool(OllamaName.parse(text))
    except UsageError:
        return False


OLLAMA = Option(
    "Also create a model of this name in Ollama at the end, of the base with the adapter or of the new model.",
    unit="NAME",
    accepts=lambda text: not text or is_name(text),
    takes="a name for a model in Ollama, such as mine or mine:v2",
    transient=True,
)
