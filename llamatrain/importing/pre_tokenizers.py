"""Finds the name by which llama.cpp knows the pre-tokenizer of a tokenizer.json.

llama.cpp's converter identifies it by the tokens that a fixed text gives. Here the expressions of the file
come first, so a vocabulary that nobody has seen is converted too; the tokens of the text only choose between
names with the same expressions.
"""

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

from llamatrain.data.tokenizer.pretokenizers import (
    ANY_CASE,
    GPT2,
    LOWER,
    PRE_TOKENIZERS,
    UPPER,
    PreTokenizer,
)
from llamatrain.errors import FileError
from llamatrain.importing.tokenizer_files import TokenizerFiles, check_kind

CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d"
    "🌫\ufe0f (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3"
    "333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែ"
    "ពិសេសអាច😁 ?我想在apple"
    "工作1314151天～ ------======= нещо на "
    "Български ''''''```````\"\"\"\"......!!"
    "!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you "
    "like some tea? We'Ve a'lL"
)
# The first 16 digits of SHA-256 of the tokens of CHECK_TEXT, written as a Python list.
HASHES = {
    "a.x-4.0": "b0a6b1c0bd5998eb",
    "afmoe": "49fc0303c9e0d2c2",
    "bailingmoe": "96a5f08be6259352",
    "bailingmoe2": "9b1be57e70d20d95",
    "bloom": "3c30d3ad1d6b6420",
    "chameleon": "60824e3c0d9401f8",
    "chatglm-bpe": "b6e8e1518dc4305b 81d72c7348a9f0eb",
    "codeshell": "7b3e7548e4308f52",
    "cohere2moe": "52df12b4c8d4176e",
    "command-r": "9c2227e4dd922002",
    "dbrx": "a8594e3edff7c29c",
    "deepseek-coder": "347715f544604f91",
    "deepseek-llm": "049ecf7629871e30",
    "deepseek-r1-qwen": "b3f499bb4255f8ca",
    "deepseek-v3": "877081d19cf6996e",
    "exaone": "4e2b24cc4770243d",
    "exaone4": "2085e1638f6c377a",
    "f2llmv2": "862f827721df9560",
    "falcon": "8aeee3860c56296a",
    "falcon-h1": "a6b57017d60e6edb 60476e1243776c4f 3eda48b4c4dc7de7 48f8e02c0359c0bb",
    "falcon3": "9d032fcbd5501f4a",
    "gemma4": "846deafc5b0fa786",
    "gigachat": "ad851be1dba641f2",
    "glm4": "a1336059768a55c9 9ca2dd618e8afaf0 cdf5f35325780597",
    "gpt-2": "0fe1cf6eda062318 3ce83efda5659b07",
    "gpt-4o": "ccc2ef013c104be7",
    "gpt3-finnish": "bc01ce58980e1db4",
    "granite-docling": "53e325976a6e1423",
    "grok-2": "66b8d4e19ab16c3b",
    "hunyuan": "7e57df22b1fe23a7",
    "hunyuan-dense": "bba3b3366b646dbd",
    "hy_v4": "e6ddf9c6686791c1",
    "jais": "b53802fb28e26d64",
    "jais-2": "bc5108ee1eb6a3d6",
    "jina-v5-nano": "a023e9fdc5a11f03",
    "joyai-llm": "b4b8ca1f9769494f",
    "kanana2": "e4d54df1ebc1f2b9",
    "kimi-k2": "81212dc7cdb7e0c1",
    "kormo": "4a2e2abae11ca2b8",
    "laguna": "972da7b59cec44d1",
    "lfm2": "9e454714343b69b9 169bf0296a13c4d9",
    "llama-bpe": "0ef9807a4087ebef",
    "llama4": "d353350c764d8c3b",
    "megrez": "d4c8f286ea6b520b",
    "mellum": "a1e163ecab2e718a",
    "mellum2": "9dcf830ee9990cdb",
    "midm-2.0": "f6791d196f87ce6b",
    "minerva-7b": "1431a23e583c9743",
    "minicpm5": "36f3066e97b7f399",
    "minimax-m2": "f4f37b6c8eb9ea29",
    "mpt": "b6dc8df998e1cfbd",
    "olmo": "b6dc8df998e1cfbd",
    "phi-2": "fcace8b9cac38ce8",
    "pixtral": "0e9433cbbb161f89",
    "poro-chat": "c7ea5862a53e4272",
    "qwen2": "d4540891389ea895 e636dc30a262dcc0",
    "qwen35": "1444df51289cfa80 d30d75d9059f1aa2",
    "refact": "6221ad2852e85ce9",
    "sarvam-moe": "62f6fb0a6fd5098c",
    "seed-coder": "d5f1dd6f980fec56",
    "smaug-bpe": "c136ed14d01c2745",
    "smollm": "855059429035d75a",
    "solar-open": "16389f0a1f51ee53",
    "spark2_5": "0a766d034107bc73",
    "stablelm2": "32d85c31273f8019",
    "starcoder": "35d91631860c815f",
    "superbpe": "7dec86086fcc38b6",
    "talkie": "f728162c1315c26e",
    "tekken": "63b97e4253352e6f",
    "tiny_aya": "d772b220ace2baec",
    "trillion": "1994ffd01900cfb3",
    "ufakzeka": "653660222fb704f6",
    "viking": "7fc505bd3104ca10",
    "youtu": "9d70134b369a70e5",
}
NAMES = {digits: name for name, several in HASHES.items() for digits in several.split()}
ENGLISH_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SAME = {
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])": ENGLISH_ENDS,
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]": UPPER,
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]": LOWER,
    "?+": "?",
    "++": "+",
}
AT_BAR = re.compile(r"((?:\\.|\[(?:\\.|[^\]\\])*\]|\((?:\\.|[^)\\])*\)|[^|])+)(?:\||$)", re.DOTALL)
LAST_SPACES = r"|\s+"  # without it, white space at the end of a text is cut the same way


def find_pre_tokenizer_names(files: TokenizerFiles) -> list[str]:
    """Return the names whose expressions are those of the file; if there are none, all names."""
    written = files.tokenizer.get("pre_tokenizer")
    check_kind(written is None or isinstance(written, dict), files.folder / "tokenizer.json", "pre_tokenizer")
    expressions = expressions_of(written or {})
    found = [name for name, each in PRE_TOKENIZERS.items() if simplified(each) == expressions]
    whole_words = files.model.get("ignore_merges") is True
    found.sort(key=lambda name: PRE_TOKENIZERS[name].whole_words != whole_words)
    return found


def name_by_tokens(ids: list[int]) -> str | None:
    """Return the name that llama.cpp gives to a tokenizer by its tokens of CHECK_TEXT."""
    return NAMES.get(sha256(str(ids).encode()).hexdigest()[:16])


def unknown_pre_tokenizer(files: TokenizerFiles) -> FileError:
    """Return an error that shows the expressions which llama.cpp does not have."""
    shown = " ".join(expressions_of(files.tokenizer.get("pre_tokenizer") or {}))[:200]
    return FileError(
        f"{files.folder / 'tokenizer.json'}: llama.cpp has no pre-tokenizer that cuts text as this file does "
        f"(got {shown or 'none'}); use a GGUF file of this model instead",
        code="unknown-pre-tokenizer",
    )


def simplified(known: PreTokenizer) -> list[str]:
    """Return the expressions of a pre-tokenizer as `expressions_of` writes them."""
    return [str(each).removesuffix(LAST_SPACES) for each in known.patterns]


def expressions_of(written: Mapping[str, Any]) -> list[str]:
    """Return the expressions of the `pre_tokenizer` of a file, one after another, in our spelling."""
    return [spelled(each).removesuffix(LAST_SPACES) for each in _expressions(written)]


def _expressions(written: Mapping[str, Any]) -> Iterator[str]:
    kind = written.get("type")
    if kind == "Sequence":
        for each in written.get("pretokenizers") or ():
            if isinstance(each, dict):
                yield from _expressions(each)
    elif kind == "Split":
        pattern = written.get("pattern")
        text = pattern.get("Regex", pattern.get("String")) if isinstance(pattern, dict) else None
        yield text if isinstance(text, str) else "?"
    elif kind == "Digits":
        yield r"\p{N}" if written.get("individual_digits") else r"\p{N}+"
    elif kind == "ByteLevel":
        if written.get("use_regex", True):
            yield GPT2
    elif kind is not None:
        yield f"<{kind}>"


def spelled(expression: str) -> str:
    """Return an expression without groups, as `pretokenizers` spells it."""
    for theirs, ours in SAME.items():
        expression = expression.replace(theirs, ours)
    branches: list[str] = []
    for match in AT_BAR.finditer(expression):
        branch = match[1]
        if branch.endswith(ENGLISH_ENDS + "?"):
            start = branch.removesuffix(ENGLISH_ENDS + "?")
            branches += [f"{start}{end}" for end in (*ANY_CASE.split("|"), "")]
        else:
            branches.append(branch.replace(ENGLISH_ENDS, ANY_CASE))
    return "|".join(branches)
