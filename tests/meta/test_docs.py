"""The documents are right: their shell lines and Python blocks run, with small files under the names they use, and few steps."""

import io
import re
import shlex
import shutil
import signal
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.cli import main as cli
from llamatrain.cli.main import COMMANDS
from llamatrain.commands import push
from llamatrain.config.options import format_flag, option_specs
from llamatrain.config.remote_names import Use
from llamatrain.run.lora_options import LoraOptions
from llamatrain.run.options import RunOptions, TrainOptions
from llamatrain.sources import create_in_ollama, names
from scripts.digits import draw_digits
from tests.helpers.adapter_files import adapter, linear
from tests.helpers.architecture_models import weights
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ROOT, finished, ran, ran_apart, started
from tests.helpers.groups import groups, write_groups
from tests.helpers.idx_files import idx_bytes
from tests.helpers.ollama_store import add_model
from tests.helpers.rerankers import reranker
from tests.helpers.small_models import loaded
from tests.helpers.tokenizer_folders import byte_level_bpe
from tests.helpers.transformers_folders import config, state, write_folder
from tests.helpers.ui_client import Client
from tests.meta.test_configs import CONFIGS, commands, material

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = "\n\n".join(path.read_text() for path in DOCUMENTS)
FEW = {
    "from-scratch": "--iters 2 --batch 1 --grad-acc 1 --ctx 32 --embd 32 --head 4 --layer 1",
    "finetune": "--iters 2 --batch 2 --grad-acc 1 --ctx 256",
    "sweep": "--iters 2 --batch 1 --ctx 32 --embd 32",
    "grpo": "--num-generations 2 --max-completion-length 4",
    "generate": "-n 3",
    "evaluate": "--ctx 256",
}
RECIPES = {
    re.sub(r"TEXT\S+", "TEXT", shlex.join(["llamatrain", *words]))
    for config in CONFIGS
    for words in commands(config)
}
STEPS = count(3)  # to which runs go on: each further than any before
SHAPES = {*("svg", "g", "defs", "clipPath", "style", "title", "text", "rect", "line", "path", "circle")}
WIDTH = 98  # of what GitHub shows of a block
AHEAD = {"mpiexec", "srun"}  # of a line of ours, which is run in one process
ELSEWHERE = {  # by what it begins with: why it is not run here
    "scripts/demo": "tests/scripts/test_demo.py does, and it needs a network",
    "scripts/test": "it runs this",
    ". .venv/bin/activate": "of the environment that scripts/demo made",
    "docker": "test_container.py looks at the files; it needs a network and Docker",
    "pip install": "it needs a network; test_packaging.py looks at what it names",
    "hf download": "it needs a network",
    "curl -L -o": "it needs a network",
    "hub=https://": "an address for the next lines",
    "school=https://": "an address for the next lines",
    "ollama": "Ollama's; its Modelfile is looked at below",
    "llama-cli -m": "llama.cpp's; the files that it names are looked at below",
    "llama-server -m": "llama.cpp's; the files that it names are looked at below",
    "llama-completion -m": "llama.cpp's; the files that it names are looked at below",
    "llamatrain --install-completion": "it changes the shell's own files",
    "python scripts/": "they take long; a test below checks that they exist",
    "scripts/check": "it runs this",
    "python -m pytest": "it runs this",
}
CLASSES = (TrainOptions, RunOptions, LoraOptions)  # those with former names
OTHERS = {  # options in prose that are other tools': taken over here, or of what stands beside
    *(
        "--learning-rate",
        "--batch-size",
        "--max_seq_length",
        "--train-data",
        "--model-base",
        "--adam-iter",
        "--cos-decay-steps",
        "--embeddings",
    ),
}


@dataclass(frozen=True)
class Block:
    """What stands in README for itself, and under which heading."""

    section: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.text.splitlines()) if line and not line.startswith("#")]


PART = re.compile(
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$|^#+ (?P<heading>[^\n]*)$", re.MULTILINE | re.DOTALL
)


def blocks() -> Iterator[Block]:
    heading = ""
    for part in PART.finditer(README):
        if part["heading"] is None:
            yield Block(heading, part["language"], part["text"])
        heading = part["heading"] or heading


BLOCKS = list(blocks())
SECTIONS = list(dict.fromkeys(block.section for block in BLOCKS if block.language == "sh"))


def lines(section: str = "") -> list[str]:
    return [
        line
        for block in BLOCKS
        if block.language == "sh" and section in ("", block.section)
        for line in block.lines
    ]


# ---- what the lines name ---------------------------------------------------


def made(name: str) -> None:
    """What stands for a file or folder that a line names, where no line before has made it."""
    if name in MADE and not Path(name).exists():
        MADE[name](name)


def there(name: str) -> None:
    """With the folders that it lies in."""
    for path in (*reversed(Path(name).parents), Path(name)):
        made(str(path))


def copied(source: str) -> Callable[[str], object]:
    def copy(name: str) -> None:
        made(source)
        shutil.copy(source, name)

    return copy


def adapter_of_base(name: str) -> None:
    made("BASE.gguf")
    h, _ = loaded(gguf.open_gguf(Path("BASE.gguf")))
    gguf.write_adapter(Path(name), adapter(h, linear(h)))


def by(line: str) -> Callable[[str], object]:
    return lambda _: run_here(line)


def earlier(run: str) -> Callable[[str], object]:
    """By the line of README that makes it."""
    return lambda _: run_here(
        next(line for line in lines() if line.split("#")[0].strip().endswith(f"--out {run}"))
    )


def checkpoint(name: str) -> None:
    made("runs/mine")
    shutil.copy(max(Path("runs/mine").glob("checkpoint-[1-9]*.gguf")), name)


MNIST = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def digits_of_mnist(name: str) -> None:
    """Drawn ones, in a file of MNIST's format."""
    drawn = draw_digits(200, 0)
    images = np.clip(255 * drawn.inputs["input"], 0, 255)
    array = images if "images" in name else drawn.targets
    assert array is not None
    Path(name).write_bytes(idx_bytes(array.astype(np.uint8)))


def given(name: str) -> object:
    return material(Path(), name)


def ollama_model(name: str) -> None:
    made("BASE.gguf")
    add_model(
        Path("models"), {"model": Path("BASE.gguf").read_bytes()}, "registry.ollama.ai/library/llama3.2/1b"
    )


def transformers_folder(name: str) -> None:
    shape = FAMILIES["llama"].shapes["a"]
    byte_level_bpe(write_folder(Path(name), config(shape), state(shape, weights(shape))))


QUESTION = '{"question": "What is up?", "choices": ["the sky", "the sea"], "answer": 0}\n'
MADE: dict[str, Callable[[str], object]] = {
    "TEXT.txt": lambda _: Path(material(Path(), "TEXT.txt")).rename("TEXT.txt"),
    "BASE.gguf": given,
    "FOLDER": transformers_folder,
    "CHATS.jsonl": given,
    "PAIRS.jsonl": given,
    "GROUPS.jsonl": lambda name: write_groups(Path(name), groups(24)),
    "RERANKER.gguf": lambda name: reranker(Path()).rename(name),
    "runs/rerank": earlier("runs/rerank"),
    "PROMPTS.jsonl": lambda name: Path(name).write_text('{"prompt": "1+2=", "sum": 3}\n' * 4),
    "reward.py": lambda name: Path(name).write_text(
        next(b.text for b in BLOCKS if name in b.text and b.language == "python")
    ),
    "MOVED.gguf": copied("BASE.gguf"),
    "qwen.gguf": copied("BASE.gguf"),
    "ONE.gguf": copied("BASE.gguf"),
    "TWO.gguf": copied("BASE.gguf"),
    "POSITIVE.txt": lambda name: Path(name).write_text("so good\nwell done\n"),
    "NEGATIVE.txt": lambda name: Path(name).write_text("so bad\nwell no\n"),
    "sums.jsonl": lambda name: Path(name).write_text('{"question": "1 + 1?", "answer": "2"}\n' * 8),
    "score.py": lambda name: Path(name).write_text(
        "def reward(prompt, answer, row):\n    return len(answer)\n"
    ),
    "QUESTIONS.jsonl": lambda name: Path(name).write_text(QUESTION * 4),
    "A.gguf": adapter_of_base,
    "B.gguf": adapter_of_base,
    "TUNED.gguf": by("llamatrain export-lora BASE.gguf --lora A.gguf --out TUNED.gguf"),
    "ollama:llama3.2:1b": ollama_model,
    "PEFTDIR": by("llamatrain export-lora BASE.gguf --lora A.gguf --peft PEFTDIR"),
    **dict.fromkeys(MNIST, digits_of_mnist),
    "runs/mine": earlier("runs/mine"),
    "runs/chats": earlier("runs/chats"),
    "runs/sums": earlier("runs/sums"),
    "runs/embed": earlier("runs/embed"),
    "runs/mine/checkpoint-800.gguf": checkpoint,
}


# ---- each line -------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all lines are run: what one has made is there for others."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / "models"))
    monkeypatch.setattr(create_in_ollama, "call", lambda command: "")  # Ollama, if it is installed here
    monkeypatch.setattr(push, "upload", lambda *_: None)  # tests/commands/test_push.py uploads
    monkeypatch.setattr(names, "_located", {})
    resolve = names.resolve
    monkeypatch.setattr(
        names, "resolve", lambda name, use: stand_in(use) if "/" in name else resolve(name, use)
    )


def stand_in(use: Use) -> Path:
    """Return a file for a name that needs a network; tests/sources downloads such files from servers of its own."""
    name = {"model": "BASE.gguf", "adapter": "A.gguf", "data": "CHATS.jsonl"}[use]
    made(name)
    return Path(name)


def run_here(line: str) -> None:
    """Our part of a line, which must succeed."""
    words = shlex.split(line, comments=True)
    words = words[words.index("llamatrain") + 1 :]
    target = words[-1] if words[-2:-1] == [">"] else ""
    words = words[:-2] if target else words
    for before, word in pairwise(["", *words]):
        if before not in ("--out", "--peft"):
            there(word)
        elif Path(word).is_dir():
            shutil.rmtree(word)
        else:
            Path(word).unlink(missing_ok=True)
    small = words[0] == "from-scratch" and "TEXT.txt" not in words  # as the sine wave stands
    resumed = "--resume" in words
    few = ["--iters", str(next(STEPS))] if resumed or small else FEW.get(words[0], "").split()
    few = [] if resumed and words[0] == "sweep" else few
    few = ["--minutes", "0.02", *few[2:]] if "--minutes" in words else few
    few += FEW["grpo"].split() if "grpo" in words else []
    if words[0] == "ui":
        serve_here(words)
        return
    done = ran_apart(*words, *few) if "--memory" in words else ran(*words, *few)
    if target:
        Path(target).write_text(done.out)


def serve_here(words: list[str]) -> None:
    """The server of a line, until it has answered."""
    Path("runs").mkdir(exist_ok=True)
    with started(*dict.fromkeys([*words, "--no-browser"])) as process:
        assert process.stderr
        client = Client(re.findall(r"http://\S+", process.stderr.readline())[0])
        assert "runs" in client.get("/api/runs")
        process.send_signal(signal.SIGINT)
        assert finished(process).code == 0


def fate(line: str) -> str:
    """Why a line is not run here; nothing where it is."""
    if re.sub(r"TEXT\S+", "TEXT", shlex.join(shlex.split(line, comments=True))) in RECIPES:
        return "test_configs.py runs what a recipe opens with"
    told = next((why for begins, why in ELSEWHERE.items() if f"{line} ".startswith(begins)), "")
    return told if told or line.split()[0] in ("llamatrain", *AHEAD) else "nobody looks at it"


def test_each_line_is_run_or_looked_at_elsewhere() -> None:
    """A new one is run, or says in the table above why it is not."""
    assert not [line for line in lines() if fate(line) == "nobody looks at it"]
    assert not [begins for begins in ELSEWHERE if not any(f"{line} ".startswith(begins) for line in lines())]
    shell = [block for block in BLOCKS if block.language == "sh"]
    assert not [line for block in shell for line in block.text.splitlines() if len(line) > WIDTH], (
        "one would have to scroll"
    )


@pytest.mark.parametrize(
    "section", [each for each in SECTIONS if any(not fate(line) for line in lines(each))]
)
def test_lines_run(section: str, here: None) -> None:
    for line in lines(section):
        if not fate(line):
            run_here(line)


def test_what_llama_cpp_and_ollama_are_given_is_there(here: None) -> None:
    """By the lines before."""
    asked = [block for block in BLOCKS if block.language == "dockerfile"]
    files = [word for block in asked for line in block.lines for word in line.split()[1:]]
    for line in lines():
        if line.startswith(("llama-cli", "llama-server", "llama-completion")):
            words = shlex.split(line, comments=True)
            files += [word for flag, word in pairwise(words) if flag in ("-m", "--lora")]
            assert {word for word in words if word.startswith("-")} <= {"-m", "--lora", "-no-cnv", "-p"}
    assert len(files) >= 5
    for name in files:
        there(name)
    assert not [name for name in files if not Path(name).is_file()]


PROGRAMS = [
    block
    for block in BLOCKS
    if block.language == "python" and re.search(r"^(import|from) llamatrain", block.text, re.MULTILINE)
]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_python_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TEXT.txt", *MNIST):
        made(name)
    code = re.sub(r"iters=(\d+)", lambda match: f"iters={max(1, int(match[1]) // 50)}", PROGRAMS[number].text)
    printed = list[tuple[Any, ...]]()
    exec(code, {"print": lambda *values: printed.append(values)})
    assert len(printed) >= 3 and all(value is not None for values in printed for value in values)


# ---- the words around ------------------------------------------------------


def test_the_generated_table_of_options_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from options import FILE, document

    assert FILE.read_text() == document(), "write it with scripts/options.py"


def test_the_readme_is_short() -> None:
    assert DOCUMENTS[0].read_text().count("\n") <= 250


def options_of(command: click.Command) -> set[str]:
    inner = [command.get_command(click.Context(command), name) for name in getattr(command, "commands", ())]  # type: ignore[attr-defined]
    own = {word for each in command.params for word in (*each.opts, *each.secondary_opts)}
    return own.union(*(options_of(each) for each in inner if each))


def test_every_option_in_prose_is_one() -> None:
    known = {"--help", "--version", "--install-completion"}.union(
        *(options_of(cli.load_command(name)) for name in COMMANDS)
    )
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))
    told = {word for span in spans for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    former = {
        format_flag(alias)
        for cls in CLASSES
        for spec in option_specs(cls).values()
        for alias in spec.option.aliases
    }
    assert len(told) > 100 and told - known - former == OTHERS


def test_its_table_of_speeds_is_that_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from bench.readme_table import HEAD, Row

    assert HEAD in README, "scripts/bench.py readme prints it"
    assert (
        Row("new", (1234.5, 2_340_000_000), (617.25, 0)).line == "| new | 1,234 | 617 | 2.00 | 2.34 GB | – |"
    )
    assert Row("alone", (12.34, 0), None).line == "| alone | 12.3 | – | – | – | – |"


def test_every_command_is_told_of() -> None:
    assert not [name for name in COMMANDS if f"llamatrain {name}" not in README]


def test_every_file_that_is_named_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    named = re.findall(r"(?:^|[`(\" ])((?:configs|scripts|llamatrain)/[\w./-]*\w)", README, re.MULTILINE)
    assert len(named) > 40 and not [name for name in named if not (ROOT / name).exists()]
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from bench.__main__ import BENCHES

    parts = re.findall(r"scripts/bench\.py (\w+)", README)
    assert {*parts} == {*BENCHES}


def test_pictures_are_small_and_whole_in_themselves() -> None:
    """No script, no font and no picture from elsewhere: GitHub would not load them."""
    pictures = sorted((ROOT / "scripts" / "pictures").iterdir())
    assert {f"scripts/pictures/{file.name}" for file in pictures} == {
        *re.findall(r"scripts/pictures/[\w.]+", README)
    }
    assert sum(file.stat().st_size for file in pictures) < 500_000
    for text in (file.read_text() for file in pictures if file.suffix == ".svg"):
        assert {each.tag.partition("}")[2] for each in ET.fromstring(text).iter()} <= SHAPES
        assert not re.search(r"url\((?!#)|@import|@font-face|href|\son\w+=", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_within_leads_somewhere(document: Path) -> None:
    broken = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", document.read_text()):
        path = (document.parent / target) if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}")
    assert not broken
