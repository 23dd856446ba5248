"""Writes user input with small errors: data, templates, chats, recipes, options, and the files of a run."""

import json
import re

from torments import gguf
from torments.fixtures import FIXED, TEMPLATE, TINY
from torments.mutate import NUMBERS, change_json, encode_json, mutate_bytes
from torments.processes import ProcessResult
from torments.trial import Argument, Trial

REAL = 200  # one in so many commands is a new interpreter, the others are forks
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
RUN_FILES = ("metrics.jsonl", "samples.jsonl", "report.json", "trace.json", "config.toml")  # files of a run
UNLIMITED = ("-n", "--iters", "--epochs")  # large values of these are valid and take long


def attempt(t: Trial, *words: Argument, stdin: bytes | None = None) -> ProcessResult:
    """Run a command, every 200th time in a new interpreter."""
    return t.run(*words, real=t.number % REAL == 0, stdin=stdin)


def mutate_json_lines(t: Trial) -> None:
    """Use data with mutated lines."""
    name = t.random.choice(["chats.jsonl", "pairs.jsonl", "better.jsonl"])
    lines = [json.loads(line) for line in (t.fixtures.files / name).read_text().splitlines()][:8]
    changed = [
        encode_json(change_json(line, t.random), t.random)
        if t.random.random() < 0.4
        else json.dumps(line).encode()
        for line in lines
    ]
    (t.folder / "d.jsonl").write_bytes(t.random.choice([b"\n", b"\n", b"\r\n", b"\n\n", b""]).join(changed))
    base = t.fixtures.files / "base.gguf"
    if t.random.random() < 0.2:
        objective = ("--objective", "dpo") if name == "better.jsonl" else ()
        attempt(t, "finetune", base, "d.jsonl", *FIXED, "--ctx", 32, "--iters", 1, "--out", "o", *objective)
    else:
        ways = [(), ("--as-chat",), ("--pack",), ("--json",)]
        attempt(t, "preview", "d.jsonl", "--model", base, *t.random.choice(ways))


def mutate_template(t: Trial) -> None:
    """Use a mutated chat template."""
    pieces = list(re.findall(r"{[{%].*?[}%]}|[^{]+", TEMPLATE))
    for _ in range(t.random.choice([1, 1, 2])):
        index = t.random.randrange(len(pieces) + 1)
        pieces[index : index + t.random.randrange(2)] = [t.random.choice(PIECES)]
    model = gguf.parse((t.fixtures.files / "plain.gguf").read_bytes())
    model.entries.append(gguf.Entry(b"tokenizer.chat_template", gguf.STRING, gguf.text("".join(pieces))))
    (t.folder / "m.gguf").write_bytes(model.pack())
    t.copy_files("chats.jsonl")
    t.log("".join(pieces))
    if t.random.random() < 0.3:
        chat_with(t, "m.gguf")
    else:
        attempt(t, "preview", "chats.jsonl", "--model", "m.gguf")


def chat_with(t: Trial, model: str) -> None:
    """Chat with a model by a mutated standard input."""
    text = t.random.choice(
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
        stdin=mutate_bytes(text, t.random),
    )


def mutate_run_files(t: Trial) -> None:
    """Mutate the files of a run; the report must show what can be read."""
    t.copy_files("profiled")
    for name in t.random.sample(RUN_FILES, t.random.choice([1, 1, 2, 5])):
        path = t.folder / "profiled" / name
        raw = path.read_bytes()
        if name.endswith(".toml"):
            lines = raw.split(b"\n")
            lines[t.random.randrange(len(lines))] = t.random.choice(WRONG).encode()
            raw = b"\n".join(lines)
        elif name.endswith(".jsonl"):
            lines = raw.splitlines()
            index = t.random.randrange(len(lines))
            lines[index] = encode_json(change_json(json.loads(lines[index]), t.random), t.random)
            raw = b"\n".join(lines) + b"\n"
        else:
            raw = encode_json(change_json(json.loads(raw), t.random), t.random)
        path.write_bytes(mutate_bytes(raw, t.random) if t.random.random() < 0.2 else raw)
    words = t.random.choice([("report", "profiled"), ("report", "profiled", "profiled", "--out", "r.html")])
    result = attempt(t, *words)
    if result.code == 0:
        page = t.folder / ("r.html" if "--out" in words else "profiled/report.html")
        t.expect(page.read_bytes().rstrip().endswith(b"</html>"), "the page is incomplete")


def mutate_recipe(t: Trial) -> None:
    """Use a mutated recipe."""
    lines = (t.fixtures.files / "recipe.toml").read_text().splitlines()
    for _ in range(t.random.choice([1, 1, 2, 3])):
        index = t.random.randrange(len(lines))
        value = t.random.choice([*NUMBERS, '"x"', "[]", "true", '"' + "x" * 5000 + '"'])
        lines[index] = t.random.choice([t.random.choice(WRONG), lines[index].split("=")[0] + "= " + value])
    raw = "\n".join(lines).encode()
    (t.folder / "r.toml").write_bytes(mutate_bytes(raw, t.random) if t.random.random() < 0.3 else raw)
    t.copy_files("text.txt")
    attempt(
        t,
        "plan",
        t.random.choice(["from-scratch", "from-scratch", "finetune"]),
        "text.txt",
        "--config",
        "r.toml",
    )


def list_options(t: Trial, command: str) -> list[str]:
    """Return the options of a command that take a value, as its help shows them."""
    index = t.fixtures.folder / "options" / command.replace(" ", "-")
    if not index.is_file():
        index.parent.mkdir(exist_ok=True)
        other = Trial(kind="help", number=0, seed=0, root=t.fixtures.folder / "helping", fixtures=t.fixtures)
        text = other.run(*command.split(), "--help").out
        index.write_text(
            "\n".join(
                re.findall(r"^[^\w-]*(--?[a-z][\w-]*)(?:,\s+--[\w-]+)?\s+[A-Z|a-z=]{2,}", text, re.MULTILINE)
            )
        )
    return index.read_text().split()


def mutate_options(t: Trial) -> None:
    """Pass options with values that make no sense."""
    t.copy_files("text.txt", "base.gguf", "adapter.gguf")
    commands: dict[str, tuple[Argument, ...]] = {
        "plan from-scratch": ("text.txt", *TINY),
        "plan finetune": ("base.gguf", "text.txt", "--ctx", 32),
        "generate": ("base.gguf", "--prompt", "ab", "-n", 2, "--threads", 1),
        "preview": ("text.txt", "--model", "base.gguf"),
        "evaluate": ("base.gguf", "text.txt", "--ctx", 32, "--threads", 1),
        "from-scratch": ("text.txt", *TINY, *FIXED, "--iters", 1, "--out", "o"),
        "finetune": ("base.gguf", "text.txt", *FIXED, "--ctx", 32, "--iters", 1, "--out", "o"),
        "export-lora": ("base.gguf", "--lora", "adapter.gguf", "--threads", 1, "--out", "o.gguf"),
        "merge": ("base.gguf", "base.gguf", "--threads", 1, "--out", "o.gguf"),
        "report": ("profiled",),
    }
    command = t.random.choices(list(commands), [6, 6, 3, 3, 1, 2, 2, 2, 2, 1])[0]
    if command == "report":
        t.copy_files("profiled")
    more = ["--max-time", "1s"] if command in ("from-scratch", "finetune") else []  # many steps are valid
    for _ in range(t.random.choice([1, 1, 2])):
        name = t.random.choice(list_options(t, command))
        numbers = [number for number in NUMBERS if name not in UNLIMITED or number not in ("4096", "65536")]
        numbers = [
            "7" if (name, number) == ("--batch", "65536") else number for number in numbers
        ]  # large batches too
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
