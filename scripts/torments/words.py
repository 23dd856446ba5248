"""What people write that is a little wrong: data, templates, talks, recipes, options, and the files of a run."""

import json
import re

from torments import gguf
from torments.core import Argument, Trial
from torments.house import SAME, TEMPLATE, TINY
from torments.mutate import NUMBERS, any_bytes, as_json, changed_json
from torments.processes import Ended

REAL = 200  # each of these is a real command, the others are forks
PIECES = (  # of chat templates
    "{{ messages }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{% if %}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].__class__.__mro__ }}",
    "{{ bos_token }}",
    "{{ 1/0 }}",
    "{{ undefined.x.y }}",
    "{% set x = namespace() %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include 'x' %}",
    "{% generation %}",
    "\x00",
    "{{ strftime_now('%Y') }}",
    "{{ messages | tojson }}",
    "{{ '%s' % messages }}",
    "{{ lipsum() }}",
    "{{ ''.join(['x'] * 10**8) }}",
)
WRONG = (  # lines of recipes
    "x = 1",
    "embd",
    "embd = [1]",
    "[table]",
    "lr = nan",
    "lr = 'x'",
    "ctx = 1e9",
    "embd = 9999999999999999999999",
    "val = [[]]",
    "data = 3",
    "iters = true",
    "seed = -1",
    "a.b.c = 1",
    'size = "\\ud800"',
    "memory = ''",
    "target = {x = 1}",
    "out = ''",
    "precision = 1979-05-27",
    "resume = 0.1",
    "b = [" * 2000,
)
TOLD = ("metrics.jsonl", "samples.jsonl", "report.json", "trace.json", "config.toml")  # of a run's files
WORK = ("-n", "--iters", "--epochs")  # however much is asked for is done


def attempt(t: Trial, *words: Argument, stdin: bytes | None = None) -> Ended:
    return t.run(*words, real=t.number % REAL == 0, stdin=stdin)


def json_lines(t: Trial) -> None:
    name = t.random.choice(["chats.jsonl", "pairs.jsonl", "better.jsonl"])
    lines = [json.loads(line) for line in (t.house.things / name).read_text().splitlines()][:8]
    changed = [
        as_json(changed_json(each, t.random), t.random)
        if t.random.random() < 0.4
        else json.dumps(each).encode()
        for each in lines
    ]
    (t.folder / "d.jsonl").write_bytes(t.random.choice([b"\n", b"\n", b"\r\n", b"\n\n", b""]).join(changed))
    base = t.house.things / "base.gguf"
    if t.random.random() < 0.2:
        objective = ("--objective", "dpo") if name == "better.jsonl" else ()
        attempt(t, "finetune", base, "d.jsonl", *SAME, "--ctx", 32, "--iters", 1, "--out", "o", *objective)
    else:
        ways = [(), ("--as-chat",), ("--pack",), ("--json",)]
        attempt(t, "preview", "d.jsonl", "--model", base, *t.random.choice(ways))


def templates(t: Trial) -> None:
    made = list(re.findall(r"{[{%].*?[}%]}|[^{]+", TEMPLATE))
    for _ in range(t.random.choice([1, 1, 2])):
        place = t.random.randrange(len(made) + 1)
        made[place : place + t.random.randrange(2)] = [t.random.choice(PIECES)]
    model = gguf.parse((t.house.things / "plain.gguf").read_bytes())
    model.entries.append(gguf.Entry(b"tokenizer.chat_template", gguf.STRING, gguf.text("".join(made))))
    (t.folder / "m.gguf").write_bytes(model.packed())
    t.given("chats.jsonl")
    t.tell("".join(made))
    if t.random.random() < 0.3:
        talk(t, "m.gguf")
    else:
        attempt(t, "preview", "chats.jsonl", "--model", "m.gguf")


def talk(t: Trial, model: str) -> None:
    said = t.random.choice(
        [b"ab\ncd\n", b"", b"\n\n\n", b"x" * 100_000, b"\xff\xfe\x00\n\x80", b"{{ 1/0 }}\n</s>\n", b"ab"]
    )
    system = t.random.choice([(), ("--system", ""), ("--system", "{{ x }}" * 500)])
    attempt(
        t,
        "generate",
        model,
        "--chat",
        "-n",
        2,
        "--ctx",
        64,
        "--threads",
        1,
        *system,
        stdin=any_bytes(said, t.random),
    )


def runs(t: Trial) -> None:
    """A run's own files, from elsewhere or damaged: a page is drawn of what can be read."""
    t.given("told")
    for name in t.random.sample(TOLD, t.random.choice([1, 1, 2, 5])):
        path = t.folder / "told" / name
        raw = path.read_bytes()
        if name.endswith(".toml"):
            lines = raw.split(b"\n")
            lines[t.random.randrange(len(lines))] = t.random.choice(WRONG).encode()
            raw = b"\n".join(lines)
        elif name.endswith(".jsonl"):
            lines = raw.splitlines()
            place = t.random.randrange(len(lines))
            lines[place] = as_json(changed_json(json.loads(lines[place]), t.random), t.random)
            raw = b"\n".join(lines) + b"\n"
        else:
            raw = as_json(changed_json(json.loads(raw), t.random), t.random)
        path.write_bytes(any_bytes(raw, t.random) if t.random.random() < 0.2 else raw)
    words = t.random.choice([("report", "told"), ("report", "told", "told", "--out", "r.html")])
    ended = attempt(t, *words)
    if ended.code == 0:
        page = t.folder / ("r.html" if "--out" in words else "told/report.html")
        t.must(page.read_bytes().rstrip().endswith(b"</html>"), "half of a page")


def recipes(t: Trial) -> None:
    lines = (t.house.things / "recipe.toml").read_text().splitlines()
    for _ in range(t.random.choice([1, 1, 2, 3])):
        place = t.random.randrange(len(lines))
        value = t.random.choice([*NUMBERS, '"x"', "[]", "true", '"' + "x" * 5000 + '"'])
        lines[place] = t.random.choice([t.random.choice(WRONG), lines[place].split("=")[0] + "= " + value])
    raw = "\n".join(lines).encode()
    (t.folder / "r.toml").write_bytes(any_bytes(raw, t.random) if t.random.random() < 0.3 else raw)
    t.given("text.txt")
    attempt(
        t,
        "plan",
        t.random.choice(["from-scratch", "from-scratch", "finetune"]),
        "text.txt",
        "--config",
        "r.toml",
    )


def options_of(t: Trial, command: str) -> list[str]:
    """Those with a value, as its help tells them."""
    place = t.house.folder / "options" / command.replace(" ", "-")
    if not place.is_file():
        place.parent.mkdir(exist_ok=True)
        other = Trial(kind="help", number=0, seed=0, place=t.house.folder / "helping", house=t.house)
        text = other.run(*command.split(), "--help").out
        place.write_text(
            "\n".join(
                re.findall(r"^[^\w-]*(--?[a-z][\w-]*)(?:,\s+--[\w-]+)?\s+[A-Z|a-z=]{2,}", text, re.MULTILINE)
            )
        )
    return place.read_text().split()


def options(t: Trial) -> None:
    """Values that nobody can mean."""
    t.given("text.txt", "base.gguf", "adapter.gguf")
    commands: dict[str, tuple[Argument, ...]] = {
        "plan from-scratch": ("text.txt", *TINY),
        "plan finetune": ("base.gguf", "text.txt", "--ctx", 32),
        "generate": ("base.gguf", "--prompt", "ab", "-n", 2, "--threads", 1),
        "preview": ("text.txt", "--model", "base.gguf"),
        "evaluate": ("base.gguf", "text.txt", "--ctx", 32, "--threads", 1),
        "from-scratch": ("text.txt", *TINY, *SAME, "--iters", 1, "--out", "o"),
        "finetune": ("base.gguf", "text.txt", *SAME, "--ctx", 32, "--iters", 1, "--out", "o"),
        "export-lora": ("base.gguf", "--lora", "adapter.gguf", "--threads", 1, "--out", "o.gguf"),
        "report": ("told",),
    }
    command = t.random.choices(list(commands), [6, 6, 3, 3, 1, 2, 2, 2, 1])[0]
    if command == "report":
        t.given("told")
    more = ["--max-time", "1s"] if command in ("from-scratch", "finetune") else []  # many steps are no fault
    for _ in range(t.random.choice([1, 1, 2])):
        name = t.random.choice(options_of(t, command))
        numbers = [each for each in NUMBERS if name not in WORK or each not in ("4096", "65536")]
        numbers = ["7" if (name, each) == ("--batch", "65536") else each for each in numbers]  # likewise
        values = [
            *numbers,
            "text.txt",
            "base.gguf",
            "/dev/null",
            "/dev/full",
            "nowhere",
            ".",
            "x" * 5000,
            "-",
            "auto",
            "all",
        ]
        more += [name, *(t.random.choice(values) for _ in range(1 + (name == "--lora-scaled")))]
    attempt(t, *command.split(), *commands[command], *more)
