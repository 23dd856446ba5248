"""Makes texts that benchmarks train on, the same from a seed on every machine."""

import random
from collections.abc import Sequence

CONSONANTS = ("b", "br", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w")
VOWELS = ("a", "e", "i", "o", "u", "ea", "ou")
# of sentences: determiner, noun, verb (s), adjective, preposition, adverb (r)
PATTERNS = ("dns", "dansdn", "dnsdan", "pdnsdn", "dnspdan", "dansr", "pdndns")


def make_play(rng: random.Random, size: int) -> str:
    """Return a text like a play.

    Speakers have their own words, verbs agree with their nouns, and few words are frequent.
    """
    nouns, verbs, adjectives, names = (make_words(rng, count) for count in (600, 300, 200, 20))
    vocabularies = {name: rng.sample(nouns, 60) for name in names}
    speeches = list[str]()
    length = 0
    while length < size:
        name = rng.choice(names)
        lines = [make_sentence(rng, vocabularies[name], verbs, adjectives) for _ in range(rng.randint(1, 4))]
        speeches.append(f"{name.upper()}:\n" + "\n".join(lines) + "\n\n")
        length += len(speeches[-1])
    return "".join(speeches)[:size]


def make_words(rng: random.Random, count: int) -> list[str]:
    """Return words of one to three syllables."""
    return [
        "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
        for _ in range(count)
    ]


def choose_word(rng: random.Random, words: Sequence[str]) -> str:
    """Return one of the words, the first far more often than the last."""
    return words[int(len(words) * rng.random() ** 3)]


def make_sentence(
    rng: random.Random, nouns: Sequence[str], verbs: Sequence[str], adjectives: Sequence[str]
) -> str:
    """Return a sentence of one of the patterns."""
    words = list[str]()
    plural = False
    for part in rng.choice(PATTERNS):
        if part == "d":
            plural = rng.random() < 0.4
            words.append("the" if rng.random() < 0.6 else "these" if plural else "a")
        elif part == "n":
            words.append(choose_word(rng, nouns) + "s" * plural)
        elif part == "s":
            words.append(choose_word(rng, verbs) + ("" if plural else "eth"))
        elif part == "a":
            words.append(choose_word(rng, adjectives))
        elif part == "p":
            words.append(rng.choice(("in", "by", "with", "upon")))
        else:
            words.append(rng.choice(("well", "now", "again")))
    return " ".join(words).capitalize() + rng.choice((".", ".", ",", "!", "?"))
