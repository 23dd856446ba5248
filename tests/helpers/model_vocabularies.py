"""Vocabularies in the shapes of the models people have: their kinds and special tokens, and pieces learned from text of ours.

tests/golden/family_truth.json has llama.cpp's tokens; `python -m tests.helpers.model_vocabularies` writes it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from llamatrain.data.tokenizer import new_vocab
from llamatrain.data.tokenizer.bpe_tables import ALPHABET, token_bytes
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.values import Kind, Value, boolean, numbers, string, strings, u32
from tests.helpers.mixed_text import Mixer

TEXT = (string("gemma4"), string("sarvam-moe"))
TRUTH = Path(__file__).parents[1] / "golden" / "family_truth.json"
SIZE = 12_000  # characters of the text that is kept, which are made anew
SNIPPET = '''
def mean(values: list[float], *, weights=None) -> float:
\t"""Weighted; without weights all count 1."""
    if not values:  # 0 / 0
        raise ValueError(f"no values: {values!r}")
    total = sum(a * b for a, b in zip(values, weights or [1.0] * len(values)))


class Reader(Base):
\tdef __init__(self, path, size=1 << 16):
\t\tself.path, self.size = path, size
        for (int i = 0; i < n; ++i) { x[i] += 0x7f & y[i]; }  // as before
<table><tr><td colspan="2">&nbsp;</td></tr></table>
'''


class Fixed(Mixer):
    """The same text as long as nothing changes here or there: the project's code is no part of it."""

    def code(self) -> str:
        at = self.random.randrange(len(SNIPPET))
        return SNIPPET[at : at + self.random.randrange(300)]


BEGIN = "<|begin_of_text|>"
FIM = "<|fim_prefix|> <|fim_middle|> <|fim_suffix|>"
IM = "<|im_start|> <|im_end|>"
STARCODER = "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <filename> <gh_stars> <issue_start> <jupyter_start> <reponame>"
TOOLS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
INST = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [TOOL_CALLS] <pad> [PREFIX] [MIDDLE] [SUFFIX]"
HTML = [
    f"<{close}{tag}>"
    for tag in ("table", "tr", "td", "h1", "ul", "li", "b", "code", "s")
    for close in ("", "/")
]
RUNS = [character * count for character in "\n \t" for count in range(1, 32) if character * count != " "]
UNUSED = " ".join(f"<unused{i}>" for i in range(99))


@dataclass(frozen=True)
class Family:
    """`control` and `shown`: its special tokens, those that are read where asked for, and user-defined ones."""

    pre: str  # none where pieces have scores
    control: str
    shown: Sequence[str] = ()
    eos: str = ""
    bos: str = ""
    name: str = "model"
    first: bool = False  # whether special tokens come before the others
    text: bool = False  # whether the pieces are text, which merges join

    def vocabulary(self) -> dict[str, Value]:
        controls, shown = self.control.split(), list(self.shown)
        special = [TokenType.CONTROL] * len(controls) + [TokenType.USER_DEFINED] * len(shown)
        tokens, kinds = self.pieces()
        if self.first:
            tokens, kinds = [*controls, *shown, *tokens], [*special, *kinds]
        else:
            tokens, kinds = [*tokens, *controls, *shown], [*kinds, *special]
        merges = text_merges() if self.text else learned()
        model = {
            "model": string("gemma4" if self.pre == "gemma4" else "gpt2"),
            "pre": string(self.pre),
            "merges": strings(map(" ".join, merges)),
        }
        if not self.pre:
            scores = [-float(i) if kind == TokenType.NORMAL else 0.0 for i, kind in enumerate(kinds)]
            model = {"model": string("llama"), "scores": numbers(Kind.FLOAT32, scores)}
            model["add_space_prefix"] = boolean(not self.first)
        told = model | {
            "tokens": strings(tokens),
            "token_type": numbers(Kind.INT32, kinds),
            "eos_token_id": u32(tokens.index(self.eos or controls[0])),
            "add_bos_token": boolean(bool(self.bos)),
            **({"bos_token_id": u32(tokens.index(self.bos))} if self.bos else {}),
        }
        return {"general.name": string(self.name)} | {
            f"tokenizer.ggml.{key}": value for key, value in told.items()
        }

    def pieces(self) -> tuple[list[str], list[int]]:
        """Return the other tokens and their kinds."""
        if self.text:
            words = ["".join(merge) for merge in text_merges()]
            known = {*self.control.split(), *self.shown}
            words = [word for word in [*words, "\n", *sorted({*"".join(words)})] if word not in known]
            tokens = [f"<0x{byte:02X}>" for byte in range(256)]
            words = list(dict.fromkeys(words))
            return [*tokens, *words], [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(words)
        if self.pre:
            tokens = list(dict.fromkeys([*ALPHABET, *map("".join, learned())]))
            return tokens, [TokenType.NORMAL] * len(tokens)
        start = [] if self.first else ["<unk>", "<s>", "</s>"]
        tokens = [*start, *(f"<0x{byte:02X}>" for byte in range(256))]
        words = [word for word in scored() if word not in {*tokens, *self.control.split(), *self.shown}]
        tokens += words
        kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL][: len(start)]
        return tokens, [*kinds, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]


@cache
def learned() -> list[tuple[str, str]]:
    return new_vocab.learn_merges([SNIPPET, Fixed(3).text(30_000)], 1200)


def text_merges() -> list[tuple[str, str]]:
    """Return the learned merges of whole characters, of runs of spaces, and of newlines, which are used if no token equals a run."""
    merges = [*learned(), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ċ", "Ġ")]
    made = list[tuple[str, str]]()
    for merge in merges:
        parts = [(token_bytes(part) or b"").decode("utf-8", "replace") for part in merge]
        if not {*"\ufffd\0"} & {*"".join(parts)}:
            left, right = (part.replace(" ", "▁") for part in parts)
            made.append((left, right))
    return list(dict.fromkeys(made))


def scored() -> Iterator[str]:
    """Characters and words as pieces with scores have them: in letters, spaces as ▁; the more frequent first."""
    texts = [raw for raw in map(token_bytes, map("".join, learned())) if raw]
    words = [
        text.replace(" ", "▁")
        for text in (raw.decode("utf-8", "replace") for raw in texts)
        if not {*"\ufffd\0"} & {*text}
    ]
    return iter(dict.fromkeys([*words, *sorted({character for word in words for character in word})]))


FAMILIES = {
    "qwen 2": Family("qwen2", f"<|endoftext|> {IM}", eos="<|im_end|>"),
    "qwen 3": Family(
        "qwen2",
        f"<|endoftext|> {IM} <|vision_start|>",
        f"{TOOLS} {FIM} <|fim_pad|> <|repo_name|> <|file_sep|>".split(),
        "<|im_end|>",
    ),
    "qwen 3.5": Family("qwen35", f"<|endoftext|> {IM}", TOOLS.split(), "<|im_end|>"),
    "gemma 3": Family(
        "",
        f"<pad> <eos> <bos> <unk> <mask> [multimodal] {UNUSED} <start_of_turn> <end_of_turn>",
        [*RUNS, *HTML],
        "<eos>",
        "<bos>",
        first=True,
    ),
    "gemma 4": Family(
        "gemma4",
        f"<pad> <eos> <bos> <unk> <mask> [multimodal] {UNUSED} <|turn> <turn|> <|tool_response>",
        ["<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", *RUNS[:5], *HTML],
        "<eos>",
        "<bos>",
        first=True,
        text=True,
    ),
    "sarvam": Family("sarvam-moe", "<pad> <eos> <bos> <unk>", RUNS[40:60], "<eos>", "<bos>", text=True),
    "phi 3": Family(
        "",
        "<|endoftext|> <|assistant|> <|placeholder1|> <|system|> <|end|> <|user|>",
        ["<|tag|>", "\n\n"],
        "<|endoftext|>",
        "<s>",
        "Phi 3.5 Mini Phi-3",
    ),
    "phi 4": Family(
        "dbrx", f"<|endoftext|> {FIM} {IM} <|im_sep|> <|dummy_0|>", eos="<|im_end|>", bos="<|endoftext|>"
    ),
    "phi 4 mini": Family(
        "gpt-4o", "<|endoftext|> <|endofprompt|> <|assistant|> <|end|> <|user|> <|system|> <|tool|> <|/tool|>"
    ),
    "granite 3": Family(
        "refact", f"<|end_of_text|> {STARCODER} <|start_of_role|> <|end_of_role|> <|tool_call|>"
    ),
    "granite 4": Family(
        "dbrx",
        f"<|end_of_text|> {FIM} <|fim_pad|> <|filename|> <|start_of_role|> <|end_of_role|>",
        ["<tool_call>", "</tool_call>"],
    ),
    "granite docling": Family(
        "granite-docling", "<|end_of_text|> <|start_of_role|> <|end_of_role|> <loc_0> <doctag>"
    ),
    "olmo 2": Family("dbrx", f"<|endoftext|> {FIM} |||EMAIL_ADDRESS||| <|pad|>", ["  ", "    ", "\n\n"]),
    "smollm 2": Family(
        "smollm", f"<|endoftext|> {IM} <repo_name> <reponame> <file_sep> <empty_output>", eos="<|im_end|>"
    ),
    "smollm 3": Family("smaug-bpe", f"<|begin_of_text|> <|end_of_text|> {IM}", TOOLS.split(), "<|im_end|>"),
    "mistral": Family("tekken", f"<unk> <s> </s> {INST}", eos="</s>", bos="<s>", first=True),
    "lfm 2": Family(
        "lfm2", f"<|pad|> <|startoftext|> <|endoftext|> {IM}", TOOLS.split(), "<|im_end|>", "<|startoftext|>"
    ),
    "glm 4": Family(
        "glm4", "<|endoftext|> [MASK] [gMASK] <sop> <eop> <|user|> <|observation|>", eos="<|user|>"
    ),
    "exaone 4": Family("exaone4", "[BOS] [PAD] [|endofturn|] [|user|] <thought>", eos="[|endofturn|]"),
    "hunyuan": Family("hunyuan-dense", "<｜hy_begin▁of▁sentence｜> <｜hy_place▁holder▁no▁2｜> <｜hy_User｜>"),
    "seed oss": Family("seed-coder", "<seed:bos> <seed:eos> <seed:think> </seed:think>", eos="<seed:eos>"),
    "stablelm 2": Family("stablelm2", f"<|endoftext|> {FIM} <fim_pad> <gh_stars> {IM}"),
    "starcoder 2": Family("starcoder", f"<|endoftext|> {STARCODER}"),
    "command r": Family(
        "command-r", "<BOS_TOKEN> <PAD> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|>", bos="<BOS_TOKEN>"
    ),
    "tiny aya": Family(
        "tiny_aya", "<BOS_TOKEN> <PAD> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|>", bos="<BOS_TOKEN>"
    ),
    "falcon h1": Family("falcon-h1", f"<|end_of_text|> <|endoftext|> <|prefix|> <|suffix|> <|middle|> {IM}"),
    "minicpm 5": Family("minicpm5", f"<s> </s> {IM}", TOOLS.split(), "<|im_end|>", "<s>"),
    "internlm 2": Family("", f"[UNUSED_TOKEN_1] {IM} <|plugin|>", TOOLS.split(), "<|im_end|>", "<s>"),
    "ernie 4.5": Family("", "<|begin_of_sentence|> <|end_of_sentence|> <mask:0>", RUNS[:9], bos="<s>"),
    "llama 3": Family(
        "llama-bpe", f"{BEGIN} <|end_of_text|> <|eot_id|> <|eom_id|>", eos="<|eot_id|>", bos=BEGIN
    ),
    "llama 4": Family(
        "llama4", f"{BEGIN} <|eot|> <|header_start|> <|header_end|> {FIM}", eos="<|eot|>", bos=BEGIN
    ),
}


def specials(vocabulary: dict[str, Value]) -> list[str]:
    from llamatrain.gguf.reader import Metadata

    metadata = Metadata(vocabulary)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return [
        tokens[i]
        for i in np.flatnonzero(np.isin(kinds, (TokenType.CONTROL, TokenType.USER_DEFINED))).tolist()
    ] + ["<unk>"]


def text_for(vocabulary: dict[str, Value]) -> bytes:
    """What is made anew, half of it broken."""
    mixer = Fixed(11, specials(vocabulary))
    text = mixer.text(SIZE).encode() + mixer.broken(SIZE)
    return text if vocabulary.get("tokenizer.ggml.pre") not in TEXT else without_long_spaces(text)


def without_long_spaces(raw: bytes) -> bytes:
    """Remove spaces of several bytes, at which llama.cpp stops if spaces are written as ▁."""
    return re.sub(b"\xc0\xa0|\xe0\x80\xa0|\xf0\x80\x80\xa0", b"", raw)


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:16]


def main() -> None:
    from tests.helpers.llama_cpp import model_with
    from tests.helpers.llama_cpp_vocabulary import Opened

    truth = {}
    with TemporaryDirectory() as folder:
        for name, family in FAMILIES.items():
            vocabulary = family.vocabulary()
            text = text_for(vocabulary)
            with Opened(model_with(vocabulary, Path(folder) / "model.gguf")) as witness:
                made = [witness.tokenize(text, special=special) for special in (False, True)]
                ends = sorted(witness.ends())
            truth[name] = {"text": hashlib.sha256(text).hexdigest()[:16], "ends": ends} | {
                key: [len(tokens), digest(tokens)]
                for key, tokens in zip(("plain", "special"), made, strict=True)
            }
    TRUTH.write_text(json.dumps(truth, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
