"""Chat templates, each with a vocabulary that knows its marks: those in `templates`, and other projects' where they can be had.

The latter are not kept here: their licences are their models'. TRL brings some forty along; a folder that LLAMATRAIN_TEMPLATES
names may hold more, such as `models/templates` of a clone of llama.cpp, and `examples` of one of vLLM.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from tests.helpers.chat_templates import Layout

MARKS = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<｜[^｜<>\s'\"{}]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z][A-Z_]{2,24}\]"
    r"|\[\|[a-z]+\|\]|\[gMASK\]|<sop>|<seed:(?:bos|eos)>"
    r"|</?(?:think|seed:think|tool_call|tool_response|tool_calls|start_of_turn|end_of_turn|s|bos|eos)>|<SPECIAL_[0-9]+>"
)
BEGINS = (
    "<|begin_of_text|>",
    "<｜begin▁of▁sentence｜>",
    "<bos>",
    "<BOS_TOKEN>",
    "<|startoftext|>",
    "[gMASK]",
    "<seed:bos>",
    "<｜hy_begin▁of▁sentence｜>",
    "<|begin_of_sentence|>",
    "<s>",
)
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|end|>",
    "<|eot|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "[|endofturn|]",
    "<seed:eos>",
    "<｜hy_place▁holder▁no▁2｜>",
    "<|assistant_end|>",
    "<|end_of_sentence|>",
    "</s>",
)
OWN = Path(__file__).parent / "templates"
MERGES = (
    ("]", '"'),
    ("Ġ", "a"),
    ("i", "s"),
    ("Ċ", "Ċ"),
    (".", "Ċ"),
    (".", "ĊĊ"),
    (">", "Ċ"),
    ("h", "e"),
    ("he", "l"),
)


def templates() -> dict[str, Path]:
    """Find them, by name."""
    found = {path.stem: path for path in sorted(OWN.glob("*.jinja"))}
    if spec := find_spec("trl"):
        folder = Path(spec.origin or "").parent / "chat_templates"
        found |= {
            f"trl/{path.stem}": path
            for path in sorted(folder.glob("*.jinja"))
            if not path.stem.endswith("_training")
        }
    if named := os.environ.get("LLAMATRAIN_TEMPLATES"):
        found |= {path.stem: path for path in sorted(Path(named).glob("*.jinja"))}
    return found


def layout_of(source: str) -> Layout:
    """A byte-level vocabulary in which every mark of a template is one token."""
    marks = sorted({*MARKS.findall(source)})
    bos = next((each for each in BEGINS if each in source), "<s>")
    eos = next((each for each in ENDS if each in source), "</s>")
    adds = "bos_token" in source or bos in source
    return Layout(source, bos, eos, tuple(marks), byte_level=True, add_bos=adds, merges=MERGES)
