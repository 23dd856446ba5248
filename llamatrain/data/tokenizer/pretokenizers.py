"""The pre-tokenizers of `tokenizer.ggml.pre`: how byte-level BPE splits text into words.

Each expression splits the pieces of the previous one into its matches and the text between them. The
expressions are llama.cpp's, without groups.
"""

from dataclasses import dataclass
from functools import cache

from llamatrain.data.tokenizer.regex import DigitGroups, Expression, compile_pattern
from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote

ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s+(?!\S)|\s+"
LINES = rf"\s*[\r\n]+|{SPACES}"
UPPER = r"[\p{L}--a-z]"
LOWER = r"[\p{L}--A-Z]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"

GPT2 = rf"{ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
LLAMA3 = rf"{ANY_CASE}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|{LINES}"
QWEN2 = rf"{ANY_CASE}|{WORD}|\p{{N}}|{SIGNS}|{LINES}"
QWEN35 = rf"{ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}"
BAILING = rf"'[sSdDmMtT]|'[lL][lL]|'[vV][eE]|'[rR][eE]|{WORD}|\p{{N}}|{SIGNS}|\s*[\r\n]|{SPACES}"
SEED = rf"{ANY_CASE}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}"
MINICPM5 = rf"{ANY_CASE}|{WORD}|\p{{N}}+|{SIGNS}|{LINES}"
HALVED = "|".join(rf"\s{{{1 << i}}}(?!\S)" for i in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"
JAIS2 = rf"{ANY_CASE}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|\s*[\r\n]+|{HALVED}"
GPT4O = (
    "|".join(f"{word}{end}" for word in CASED for end in (*ANY_CASE.split("|"), ""))
    + rf"|\p{{N}}{{1,3}}|{PATHS}"
)
PRINTED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
# Escapes replace letters that Unicode normalization would change.
SCRIPTS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-"
    "Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]"
)
HAN = "[一-龥ࠀ-一가-퟿]+"
HAN_KANA = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK3 = (r"\p{N}{1,3}", HAN_KANA, rf"{PRINTED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}")
SPARK = (r"\p{N}{1,3}", HAN_KANA, rf"{PRINTED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{SPACES}", r"\p{N}")
DIGIT = (r"\p{N}", GPT2)
MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
MARKED_WORDS = "|".join(MARKED + end for end in (*ANY_CASE.split("|"), ""))
AFTER_GROUPS = DigitGroups(r"\p{N}", after=True)
TINY_AYA = rf"{MARKED_WORDS}|\p{{N}}{{1,3}}|{PATHS}"
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + HAN_KANA,
    rf"{MARKED_WORDS}|\p{{N}}|{PATHS}",
)
ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff"
    "\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
IDEOGRAPHS = "㐀-䶿一-鿿\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}--{IDEOGRAPHS}]+"
KIMI = (
    f"[{IDEOGRAPHS}]+|"
    + "|".join(KIMI_WORD + end for end in (*ANY_CASE.split("|"), ""))
    + rf"|\p{{N}}{{1,3}}|{SIGNS}|{LINES}"
)
JOINERS = "\u200c\u200d"
K2 = rf"{ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}{JOINERS}]+|\p{{N}}{{1,3}}|{SIGNS}|{LINES}"
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)


@dataclass(frozen=True)
class PreTokenizer:
    """The expressions that split text, and other facts that llama.cpp derives from the name."""

    patterns: tuple[str | DigitGroups, ...]
    whole_words: bool = False  # a word that equals a token is not merged
    add_bos: bool = False
    always_bos: bool = False  # even if the file says otherwise
    characters: bool = False  # tokens are text, in which SPACE replaces spaces; only lines are words
    whole_lines: bool = False  # newlines that equal a token are not merged

    def expressions(self) -> tuple[Expression, ...]:
        """Compile the expressions."""
        return tuple(map(_expression, self.patterns))


_expression = cache(compile_pattern)
_KNOWN = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (LLAMA3,), True, True
    ),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": PreTokenizer(
        (GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer(DIGIT),
    "smaug-bpe dbrx chatglm-bpe": PreTokenizer((LLAMA3,)),
    "glm4 glm5": PreTokenizer((LLAMA3,), True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((QWEN35,)),
    "ufakzeka": PreTokenizer((rf"{WORD}|\p{{N}}|{SIGNS}|{LINES}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", MINICPM5), True),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((BAILING,)),
    "seed-coder": PreTokenizer((SEED,)),
    "jais-2": PreTokenizer((JAIS2,)),
    "tekken": PreTokenizer((rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{PATHS}",), True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((GPT4O,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{SCRIPTS}+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", HAN, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(DEEPSEEK3),
    "spark2_5": PreTokenizer(SPARK),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "poro-chat bloom gpt3-finnish": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "gemma4": PreTokenizer((), characters=True, whole_lines=True, always_bos=True),
    "sarvam-moe": PreTokenizer((), characters=True),
    "tiny_aya cohere2moe": PreTokenizer((AFTER_GROUPS, TINY_AYA)),
    "superbpe": PreTokenizer((r"\p{N}+", DigitGroups("[0-9]", after=False))),
    "afmoe": PreTokenizer((AFTER_GROUPS, ASIAN, DEEPSEEK3[-1])),
    "youtu": PreTokenizer(YOUTU, True),
    "kimi-k2": PreTokenizer((KIMI,)),
    "k2-horizon": PreTokenizer((K2,)),
    "chameleon": PreTokenizer(CHAMELEON, add_bos=True),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}
PRE_TOKENIZERS = {name: pre for names, pre in _KNOWN.items() for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of this name; raise FileError if it is unknown."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        examples = "llama-bpe, gpt-2, default, smaug-bpe, qwen2, deepseek-llm, tekken, smollm and their kin"
        raise FileError(
            f"unknown pre-tokenizer in tokenizer.ggml.pre (got {quote(name)}); examples are {examples}",
            code="unknown-pre-tokenizer",
        ) from None
