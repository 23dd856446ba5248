"""llamatrain trains and fine-tunes language models in GGUF files."""

__version__ = "0.1.0"
__all__ = [
    "ChatSession",
    "Comparison",
    "ControlVector",
    "Evaluation",
    "Extracted",
    "GeneratedText",
    "Imatrix",
    "Imported",
    "LlamatrainError",
    "LoadedModel",
    "Merged",
    "PreviewRow",
    "Pushed",
    "Retrieval",
    "Run",
    "RunPlan",
    "SweepResult",
    "UsageError",
    "chat",
    "control_vector",
    "embed",
    "evaluate",
    "export_lora",
    "extract_lora",
    "finetune",
    "from_scratch",
    "imatrix",
    "import_model",
    "load",
    "merge",
    "plan",
    "preview",
    "push",
    "rerank",
    "sweep",
]

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from llamatrain.api import (
        ChatSession,
        Comparison,
        ControlVector,
        Evaluation,
        Extracted,
        GeneratedText,
        Imatrix,
        Imported,
        LlamatrainError,
        LoadedModel,
        Merged,
        PreviewRow,
        Pushed,
        Retrieval,
        Run,
        RunPlan,
        SweepResult,
        UsageError,
        chat,
        control_vector,
        embed,
        evaluate,
        export_lora,
        extract_lora,
        finetune,
        from_scratch,
        imatrix,
        import_model,
        load,
        merge,
        plan,
        preview,
        push,
        rerank,
        sweep,
    )


def __getattr__(name: str) -> object:
    """Import the Python API when a name of it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("llamatrain.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
