"""Passes inputs of up to ten megabytes that are long in some way; each must take little time and memory."""

import json
from collections.abc import Callable
from random import Random

from torments.fixtures import FIXED, TINY
from torments.trial import Argument, Kind, Trial

SECONDS, MEMORY = 20.0, 300_000_000  # for ten megabytes
UNCUT_MEMORY = 130_000_000  # for a text without spaces, which cannot be cut
VOCABULARY_SECONDS = 20.0  # CPU seconds for a vocabulary
MEGABYTE = 1_000_000


def make_chat(count: int, length: int, roles: tuple[str, ...] = ("user", "assistant")) -> str:
    """Return a line of JSON with a chat."""
    words = "".join(Random(length).choices("abcdefghij ", k=length))
    return (
        json.dumps({"messages": [{"role": roles[i % len(roles)], "content": words} for i in range(count)]})
        + "\n"
    )


def make_text(alphabet: str, count: int) -> str:
    """Return random letters of an alphabet."""
    return "".join(Random(1).choices(alphabet, k=count))


CJK = "".join(map(chr, range(0x4E00, 0x9FA0)))
DATA: dict[str, Callable[[], str]] = {
    "20,000 messages": lambda: make_chat(2, 10) + make_chat(20_000, 20),
    "200 messages of 4,000 characters": lambda: make_chat(200, 4_000),
    "one message of 9 MB": lambda: make_chat(2, 4_500_000),
    "20,000 chats": lambda: make_chat(2, 100) * 20_000,
    "one turn of the assistant's after 20,000 of the user's": lambda: make_chat(20_000, 20, ("user",)),
    "deep JSON": lambda: '{"text": ' + "[" * 2_000_000 + "]" * 2_000_000 + "}\n",
    "a JSON number of 5 MB": lambda: '{"text": ' + "9" * 5 * MEGABYTE + "}\n",
    "a prompt of 5 MB": lambda: (
        json.dumps({"prompt": make_text("abc ", 5 * MEGABYTE), "completion": "x"}) + "\n"
    ),
    "100,000 empty lines": lambda: "\n" * 100_000 + make_chat(2, 10),
}
TEXTS: dict[str, Callable[[], str]] = {
    "DNA": lambda: make_text("ACGT", 10 * MEGABYTE),
    "CJK": lambda: make_text(CJK, 10 * MEGABYTE // 3),
    "one line": lambda: make_text("abcdefghijklmnop ", 10 * MEGABYTE),
    "one letter": lambda: "a" * 10 * MEGABYTE,
    "white space": lambda: make_text(" \n\t", 10 * MEGABYTE),
    "digits": lambda: make_text("0123456789", 10 * MEGABYTE),
    "prose": lambda: "the quick brown fox jumps over the lazy dog. " * 220_000,
    "any characters": lambda: make_text("".join(map(chr, range(32, 0xD800))), 10 * MEGABYTE // 3),
}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {  # they never end, or take much memory
    "a power": "{{ (10**7) ** (10**7) }}",
    "a power of what is known later": "{{ (10**7 + messages|length) ** (10**7) }}",
    "nested loops": LOOPS,
    "nested loops for all but the smallest chat": "{% if messages[0].content|length > 2 %}"
    + LOOPS
    + "{% endif %}x",
    "JSON of a large list": "{{ ((range(99999) | list) * 50) | tojson }}",
    "a list that grows while it is read": "{% for m in messages %}{% set _ = messages.append(m) %}{% endfor %}",
}
HOSTILE_SECONDS = 5.0  # CPU seconds, the start of the command included
SHORT = (0, 1, 5)  # of the cases
CASES = [("preview", name) for name in DATA] + [
    (command, name) for name in TEXTS for command in ("learned", "preview", "generate")
]
CASES += [("template", name) for name in TEMPLATES]


def trial(t: Trial) -> None:
    """Run a command on a large input."""
    if t.number >= len(CASES):
        t.skipped = "there is no such trial"
        return
    command, name = CASES[t.number]
    t.copy_files("base.gguf", "learned.gguf", "text.txt")
    if command == "template":
        try_hostile_template(t, TEMPLATES[name])
        return
    path = t.folder / ("data.jsonl" if name in DATA else "data.txt")
    path.write_text((DATA.get(name) or TEXTS[name])(), encoding="utf-8", errors="replace")
    t.log(f"{name}:")
    memory = UNCUT_MEMORY if name in ("one letter", "white space") and command != "generate" else MEMORY
    model = "learned.gguf" if t.number % 2 else "base.gguf"
    if command == "learned":
        words: tuple[Argument, ...] = (
            "from-scratch",
            path,
            *TINY[2:],
            *FIXED,
            "--vocab-size",
            1000,
            "--iters",
            1,
            "--out",
            "o",
        )
        t.run(*words, real=True, codes=(0, 1), seconds=SECONDS + VOCABULARY_SECONDS, memory=memory)
    elif command == "generate":
        t.run(
            "generate",
            model,
            "--file",
            path,
            "-n",
            1,
            "--threads",
            1,
            real=True,
            seconds=SECONDS,
            memory=MEMORY,
        )
    else:
        result = t.run(
            *("preview", path, "--model", "base.gguf" if name in DATA else model, "-n", 1, "--ctx", 8192),
            real=True,
            codes=(0, 1),
            seconds=SECONDS,
            memory=memory,
        )
        if "messages" in name:
            t.expect(result.code == 0 and result.out.strip(), "the chat is refused with all the data")


def try_hostile_template(t: Trial, source: str) -> None:
    """Use a chat template that would never end; it must be refused soon."""
    (t.folder / "chats.jsonl").write_text(make_chat(2, 20) * 200)
    (t.folder / "hostile.jinja").write_text(source)
    words = ("preview", "chats.jsonl", "--model", "base.gguf", "--chat-template", "hostile.jinja", "-n", 1)
    t.run(*words, real=True, codes=(1,), seconds=HOSTILE_SECONDS, memory=MEMORY)


KIND = Kind(
    name="large",
    what="pass inputs of ten megabytes",
    count=lambda _: len(CASES),
    short=SHORT,
    trial=trial,
)
