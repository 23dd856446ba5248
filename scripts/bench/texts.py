"""Makes the texts that benchmarks train on, the same from a seed on every machine: stories and plays."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# ---- stories ----------------------------------------------------------------


def split_words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


NAMES = {
    "he": split_words(
        "Tim Tom Ben Sam Max Jack Leo Finn Omar Theo Hugo Paul Noah Luca Adam Kofi Arlo Milo Ravi Ned"
    ),
    "she": split_words(
        "Lily Mia Sue Anna Lucy Rosa Emma Zoe Nina Ida Clara Maya Ella Ruth Tara Amy Nora Jane Kim Ada"
    ),
}
ANIMALS = split_words(
    "cat dog bird fox bear mouse rabbit frog duck owl pig goat hen horse lamb turtle squirrel bee deer fish"
)
COLORS = split_words("red blue green yellow white black brown pink golden silver purple gray")
QUALITIES = split_words(
    "big small old new shiny soft heavy pretty funny strange warm round smooth lovely tiny special"
)
MOODS = split_words(
    "happy sad brave shy kind curious tired clever lonely lazy careful proud playful hungry gentle quiet"
)
THINGS = split_words(
    "ball kite doll boat drum hat book cup bell box key rope shell stone stick ring scarf spoon lamp basket blanket "
    "bucket button crown flute mask mirror pillow puzzle robot ribbon shoe sled train trumpet wagon whistle"
)
FOODS = split_words(
    "apple cake pie cookie pear soup bread carrot cherry plum sandwich pancake banana muffin berry nut"
)
PLACES = {
    "in": split_words(
        "garden forest park kitchen barn field village cave attic library market meadow yard shed tower"
    ),
    "by": split_words("river lake sea pond road bridge fence well gate hill tree window mill"),
}
WEATHERS = (
    "the sun was bright",
    "it was cold and windy",
    "a soft rain fell",
    "there was snow everywhere",
    "the sky was full of clouds",
    "it was very hot",
)
RELATIVES = split_words("mom dad grandma grandpa sister brother aunt uncle teacher neighbor")
LESSONS = {
    "lost": ("it is good to look after your things", "if you keep looking, you will find it"),
    "shared": ("sharing makes everyone happy", "a friend is worth more than any toy"),
    "broken": ("it is better to tell the truth", "broken things can often be fixed"),
    "afraid": ("being brave means trying anyway", "some things only look scary"),
    "hungry": ("helping others feels good", "there is always enough for two"),
}


def choose_often(rng: random.Random, words: Sequence[str]) -> str:
    """Return one of the words; the first ones are frequent and the last ones rare."""
    return words[int(len(words) * rng.random() ** 2)]


@dataclass
class Story:
    """The people and things of a story, and its sentences so far."""

    rng: random.Random
    sentences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.he = rng.choice(sorted(NAMES))
        self.name = choose_often(rng, NAMES[self.he])
        self.his, self.him = ("his", "him") if self.he == "he" else ("her", "her")
        self.mood = choose_often(rng, MOODS)
        self.thing = f"{rng.choice((choose_often(rng, COLORS), choose_often(rng, QUALITIES)))} {choose_often(rng, THINGS)}"
        self.noun = self.thing.split(" ", 1)[1]
        self.food = choose_often(rng, FOODS)
        near = rng.choice(sorted(PLACES))
        self.place = f"{near} the {choose_often(rng, PLACES[near])}"
        near = rng.choice(sorted(PLACES))
        self.other_place = f"{near} the {choose_often(rng, PLACES[near])}"
        self.relative = choose_often(rng, RELATIVES)
        self.animal = choose_often(rng, ANIMALS)
        self.friend = rng.choice((f"the {self.animal}", choose_often(rng, NAMES[rng.choice(sorted(NAMES))])))
        if self.friend == self.name:
            self.friend = f"the {self.animal}"

    def say(self, *variants: str) -> None:
        """Add one of the sentences, with the story's people and things in their places."""
        text = self.rng.choice(variants).format(**vars(self), a_thing=with_article(self.thing))
        self.sentences.append(text[0].upper() + text[1:])

    def maybe_say(self, *variants: str) -> None:
        """Add one of the sentences, or none."""
        if self.rng.random() < 0.5:
            self.say(*variants)

    def end_paragraph(self) -> None:
        """Begin a new paragraph."""
        self.sentences.append("\n\n")

    @property
    def text(self) -> str:
        """The whole story."""
        return " ".join(self.sentences).replace(" \n\n ", "\n").strip() + "\n\n"


def with_article(words: str) -> str:
    """Return the words after "a" or "an"."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def begin(story: Story) -> None:
    """Introduce the child, the thing and the place."""
    story.say(
        "Once upon a time there was a {mood} child named {name}.",
        "One day {name} woke up early and felt {mood}.",
        "There once was a little {animal} and a child called {name}, who was very {mood}.",
        "{name} lived with {his} {relative} near a small town.",
    )
    story.maybe_say(
        "That morning " + story.rng.choice(WEATHERS) + ".", "Outside, " + story.rng.choice(WEATHERS) + "."
    )
    story.say(
        "{name} had {a_thing} and took it everywhere.",
        "{his} {relative} gave {him} {a_thing}.",
        "{he} loved {his} {thing} more than anything.",
        "{he} found {a_thing} {place} and wanted to keep it.",
    )
    story.maybe_say(
        "{he} played with the {noun} all day.",
        "{he} showed the {noun} to {his} {relative}.",
        '"What a lovely {noun}!" said {his} {relative}.',
    )


def lose(story: Story) -> None:
    """Lose the thing and find it again."""
    story.say(
        "{he} went to play {place} and left the {noun} there.",
        "While {he} was {place}, the {noun} fell out of {his} bag.",
    )
    story.say(
        "When {he} came home, the {noun} was gone.", "At bedtime {name} could not find the {noun} anywhere."
    )
    story.maybe_say("{he} began to cry.", "{he} looked under the bed, but it was not there.")
    story.end_paragraph()
    story.say(
        '"Have you seen my {thing}?" {name} asked {friend}.', '{friend} asked, "Why are you sad, {name}?"'
    )
    story.say('"Let us look {other_place}," said {friend}.', '"Where did you play today?" asked {friend}.')
    story.say(
        "They looked {other_place}, but they only found an old {food}.",
        "They walked back, and there it was, {place}.",
        "{friend} saw something {place}. It was the {noun}!",
    )
    story.say("{name} hugged {friend}.", '"Thank you, {friend}!" said {name}.')


def share(story: Story) -> None:
    """Share the thing with a friend."""
    story.say("Then {friend} came and wanted to play too.", "{friend} saw the {noun} and liked it very much.")
    story.say('"It is mine!" said {name}.', "At first {name} did not want to share.")
    story.say("{friend} felt sad and walked away.", "{friend} sat down alone {other_place}.")
    story.end_paragraph()
    story.say(
        '{his} {relative} said, "You can play with the {noun} together."',
        "{name} thought about it for a while.",
    )
    story.say(
        '"I am sorry," said {name}. "Do you want to play with my {noun}?"',
        "So {name} gave the {noun} to {friend} for a day.",
    )
    story.say("They played {other_place} until it got dark.", "After that they shared the {noun} every day.")


def break_it(story: Story) -> None:
    """Break the thing and tell the truth."""
    story.say(
        "{name} ran too fast and the {noun} fell down.",
        "{he} jumped on the {noun}, and it broke with a loud crack.",
    )
    story.say("{he} was afraid that {his} {relative} would be angry.", "{he} hid the {noun} {other_place}.")
    story.end_paragraph()
    story.say(
        '"Where is your {noun}?" asked {his} {relative}.',
        "In the evening {his} {relative} looked for the {noun}.",
    )
    story.say(
        '"I broke it," said {name}, and looked at the floor.',
        "{name} told {him}self to be honest, and said what had happened.",
    )
    story.say(
        "{his} {relative} smiled and got some glue.", '"We can fix it together," said {his} {relative}.'
    )
    story.say(
        "Soon the {noun} was as good as before.",
        "Now the {thing} had a little scar, and {name} liked it even more.",
    )


def fear(story: Story) -> None:
    """Meet something that looks frightening."""
    story.say("That night {name} heard a strange noise {place}.", "{name} saw two eyes {place}.")
    story.say('"Who is there?" {he} asked.', "{his} heart was beating fast, and {he} held the {noun} tight.")
    story.maybe_say("{he} wanted to run away.", "{name} called {his} {relative}, but nobody came.")
    story.end_paragraph()
    story.say(
        "Slowly {he} went closer. It was only a {animal}!",
        "Then a small {animal} came out and looked at {him}.",
    )
    story.say('"Do not be afraid," said the {animal}.', "The {animal} was more scared than {name}.")
    story.say(
        "{name} gave the {animal} some {food} and they became friends.",
        "From then on the {animal} came to see {name} every night.",
    )


def feed(story: Story) -> None:
    """Meet somebody who is hungry."""
    story.say("{name} had a {food} in {his} bag for lunch.", "{his} {relative} made a {food} for {him}.")
    story.say(
        "On the way {he} met {friend}, who looked hungry.",
        "{friend} was sitting {other_place} and had nothing to eat.",
    )
    story.end_paragraph()
    story.say(
        '"Would you like half of my {food}?" asked {name}.',
        "{name} looked at the {food} and then at {friend}.",
    )
    story.say(
        "They ate the {food} together {other_place}.",
        '"You are so kind," said {friend}, and ate the {food} at once.',
    )
    story.say(
        "The next day {friend} brought {him} {a_thing}.", "{friend} helped {name} to carry the {noun} home."
    )


PLOTS: dict[str, Callable[[Story], None]] = {
    "lost": lose,
    "shared": share,
    "broken": break_it,
    "afraid": fear,
    "hungry": feed,
}


def make_story(rng: random.Random) -> str:
    """Return one story, in which people and things keep their names."""
    story = Story(rng)
    plots = rng.sample(sorted(PLOTS), rng.choice((1, 1, 2)))
    begin(story)
    for plot in plots:
        story.end_paragraph()
        PLOTS[plot](story)
    story.maybe_say("{name} was {mood} no more.", "That night {name} slept well.", "And {name} felt happy.")
    story.maybe_say(*(f"{{name}} learned that {lesson}." for lesson in LESSONS[plots[-1]]))
    return story.text


def make_stories(seed: int, size: int) -> str:
    """Return about `size` characters of short stories in plain words, like those of TinyStories."""
    rng, stories, length = random.Random(seed), list[str](), 0
    while length < size:
        stories.append(make_story(rng))
        length += len(stories[-1])
    return "".join(stories)


# ---- plays ------------------------------------------------------------------

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
