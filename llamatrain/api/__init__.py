"""The Python API: the commands as functions that return records and print nothing.

Options are keywords, named as on the command line (`--val-split 0.1` is `val_split=0.1`); options that can be
repeated take a list. Their types for type checkers are in `option_types.py`, which `scripts/api_options.py`
writes; `help` shows them too. All failures raise `LlamatrainError`. In the main thread Ctrl-C saves a run
that has started and becomes a `KeyboardInterrupt`; no other signal is touched, and the process is never
ended.
"""

from llamatrain.api.files import control_vector, export_lora, extract_lora, imatrix, import_model, merge, push
from llamatrain.api.generation import ChatSession, LoadedModel, chat, load
from llamatrain.api.run_result import Run
from llamatrain.api.scores import embed, evaluate, rerank
from llamatrain.api.training import finetune, from_scratch, plan, preview, sweep
from llamatrain.commands.control_vector import ControlVector
from llamatrain.commands.evaluation import Evaluation, Retrieval
from llamatrain.commands.extract_lora import Extracted
from llamatrain.commands.generate_many import GeneratedText
from llamatrain.commands.imatrix import Imatrix
from llamatrain.commands.import_model import Imported
from llamatrain.commands.logit_diff import Comparison
from llamatrain.commands.merge_adapters import Merged
from llamatrain.commands.plan import RunPlan
from llamatrain.commands.preview import PreviewRow
from llamatrain.commands.push import Pushed
from llamatrain.commands.sweep_result import SweepResult
from llamatrain.errors import LlamatrainError, UsageError

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
