"""Creates vocabularies for new models, as GGUF metadata.

A vocabulary is learned from text, of bytes only, or without text. They are byte-level with the pre-tokenizer
`llama-bpe`, so that llama.cpp gives the same tokens: first a begin and an end token, then the 256 bytes, then
the merges, the most frequent first. There is no unknown token: any text can be written in bytes.
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

BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
SMALLEST = 2 + len(ALPHABET)
LARGEST = 1 << 20
PRE = "llama-bpe"


def learn_vocabulary(texts: Iterable[str | bytes], size: int) -> dict[str, Value]:
    """Learn `size` tokens, or fewer if no more pairs occur twice; the same text gives the same tokens."""
    check_size(size)
    return build_metadata(learn_merges(texts, size))


def check_size(size: int) -> None:
    """Raise UsageError if a vocabulary cannot have this size."""
    if not SMALLEST <= size <= LARGEST:
        raise UsageError(
            f"a vocabulary must have {SMALLEST} tokens (two for begin and end, 256 bytes) to {LARGEST} "
            f"(got {size})",
            code="bad-vocabulary-size",
        )


def learn_merges(texts: Iterable[str | bytes], size: int) -> list[tuple[str, str]]:
    """Return the pairs to merge, the most frequent first.

    They end when there are `size` tokens or no pair occurs twice.
    """
    from llamatrain.data.tokenizer.bpe_train import BpeTrainer
    from llamatrain.data.tokenizer.word_counts import WordCounter  # imported late: they load compiled code

    counter = WordCounter(PRE_TOKENIZERS[PRE].expressions()[0])
    for text in texts:
        counter.add(text)
    if not counter.pieces:
        raise DataError("there is no text to learn a vocabulary from; check the data", code="no-text")
    learner = BpeTrainer(counter.known, counter.counts[: counter.pieces], ordered_bytes(), size - 2)
    del counter  # free its tables
    pairs = collect_merges(learner)
    del learner
    trim_heap()
    return pairs


def collect_merges(learner: "BpeTrainer") -> list[tuple[str, str]]:
    """Run a trainer with a progress bar; return its merges as texts."""
    merges = dict[tuple[int, int], None]()
    with progress_bar(
        "learning a vocabulary", total=learner.max_tokens - len(ALPHABET), unit=" tokens"
    ) as bar:
        for pairs in learner:
            for left, right in pairs.tolist():
                merges.pop((left, right), None)  # if a pair is merged again, the last time counts
                merges[left, right] = None
            bar.update(learner.learned_count - bar.n)
    names = ["".join(map(ALPHABET.__getitem__, raw)) for raw in learner.token_bytes()]
    return [(names[left], names[right]) for left, right in merges]


def ordered_bytes() -> bytes:
    """Return the bytes in the order of their characters."""
    return bytes(map(ALPHABET.index, sorted(ALPHABET)))


def bytes_vocabulary() -> dict[str, Value]:
    """Return a vocabulary of bytes only."""
    return build_metadata([])


def textless_vocabulary(size: int) -> dict[str, Value]:
    """Return the vocabulary of a model whose tokens are no text, such as the sine wave's."""
    return {f"{KEY}model": string(WITHOUT_TEXT[0]), "llama.vocab_size": u32(size)}


def build_metadata(pairs: Sequence[tuple[str, str]]) -> dict[str, Value]:
    """Return the metadata of a byte-level vocabulary with these merges."""
    # Two merges may give the same token, but llama.cpp rejects repeated tokens.
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
