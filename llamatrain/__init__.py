"""llamatrain trains llama models where the llama.cpp world keeps them: in GGUF files."""

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Evaluation",
    "LlamatrainError",
    "LoadedModel",
    "Merged",
    "Run",
    "UsageError",
    "evaluate",
    "export_lora",
    "finetune",
    "from_scratch",
    "load",
]

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from llamatrain.api import (
        Comparison,
        Evaluation,
        LlamatrainError,
        LoadedModel,
        Merged,
        Run,
        UsageError,
        evaluate,
        export_lora,
        finetune,
        from_scratch,
        load,
    )


def __getattr__(name: str) -> object:
    """What is behind the door is loaded when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("llamatrain.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
