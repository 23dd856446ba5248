"""Vocabularies for models from scratch, as a GGUF file keeps them: learned from text, of bytes only, or without text.

They are byte-level with the pre-tokenizer `llama-bpe`, so that llama.cpp makes the same tokens: first a token that begins
and one that ends a text, then the 256 bytes, then what was merged, the most frequent first. There is no unknown token:
any text can be written in bytes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamatrain.data.tokenizer.bpe_tables import ALPHABET
from llamatrain.data.tokenizer.pretokenizers import PRE_TOKENIZERS
from llamatrain.data.tokenizer.vocabulary import KEY, WITHOUT_TEXT
from llamatrain.errors import DataError, UsageError
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.values import Kind, Value, boolean, numbers, string, strings, u32
from llamatrain.platform.memory import trim_heap
from llamatrain.platform.terminal import progress_bar

if TYPE_CHECKING:
    from llamatrain.data.tokenizer.bpe_train import BpeTrainer

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
SMALLEST = 2 + len(ALPHABET)
LARGEST = 1 << 20
PRE = "llama-bpe"


def learned(texts: Iterable[str | bytes], size: int) -> dict[str, Value]:
    """`size` tokens, or fewer where the text has no more pairs that come twice; the same text gives the same tokens."""
    check_size(size)
    return byte_level(merges(texts, size))


def check_size(size: int) -> None:
    if not SMALLEST <= size <= LARGEST:
        raise UsageError(
            f"a vocabulary of {size} tokens: it must have {SMALLEST} (two for begin and end, 256 bytes) to {LARGEST}"
        )


def merges(texts: Iterable[str | bytes], size: int) -> list[tuple[str, str]]:
    """The pairs that are merged, the most frequent first, until there are so many tokens or no pair comes twice."""
    from llamatrain.data.tokenizer.bpe_train import BpeTrainer
    from llamatrain.data.tokenizer.word_counts import WordCounter  # these are compiled

    counter = WordCounter(PRE_TOKENIZERS[PRE].expressions()[0])
    for text in texts:
        counter.add(text)
    if not counter.pieces:
        raise DataError("there is no text to learn a vocabulary from")
    learner = BpeTrainer(counter.known, counter.counts[: counter.pieces], letters(), size - 2)
    del counter  # its tables
    found = merged(learner)
    del learner
    trim_heap()
    return found


def merged(learner: "BpeTrainer") -> list[tuple[str, str]]:
    made = dict[tuple[int, int], None]()
    with progress_bar("learning a vocabulary", total=learner.most - len(ALPHABET), unit=" tokens") as told:
        for pairs in learner:
            for left, right in pairs.tolist():
                made.pop((left, right), None)  # of one that is merged again the last time counts
                made[left, right] = None
            told.update(learner.learned - told.n)
    names = ["".join(map(ALPHABET.__getitem__, raw)) for raw in learner.texts()]
    return [(names[left], names[right]) for left, right in made]


def letters() -> bytes:
    """The bytes in the order of their characters."""
    return bytes(map(ALPHABET.index, sorted(ALPHABET)))


def bytes_only() -> dict[str, Value]:
    return byte_level([])


def without_text(size: int) -> dict[str, Value]:
    """For models whose tokens stand for no text, such as the sine wave's."""
    return {f"{KEY}model": string(WITHOUT_TEXT[0]), "llama.vocab_size": u32(size)}


def byte_level(pairs: Sequence[tuple[str, str]]) -> dict[str, Value]:
    # Two merges may make the same token; llama.cpp takes no token twice.
    tokens = list(dict.fromkeys([BEGIN, END, *ALPHABET, *(left + right for left, right in pairs)]))
    kinds = [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(tokens) - 2)
    return {
        f"{KEY}model": string("gpt2"),
        f"{KEY}pre": string(PRE),
        f"{KEY}tokens": strings(tokens),
        f"{KEY}token_type": numbers(Kind.INT32, kinds),
        f"{KEY}merges": strings(f"{left} {right}" for left, right in pairs),
        f"{KEY}bos_token_id": u32(0),
        f"{KEY}eos_token_id": u32(1),
        f"{KEY}add_bos_token": boolean(True),
        f"{KEY}add_eos_token": boolean(False),
    }
