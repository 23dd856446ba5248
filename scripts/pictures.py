"""Makes the pictures of README in scripts/pictures, from real runs.

    python scripts/pictures.py               all of them, in two or three minutes
    python scripts/pictures.py demo          demo.svg: a terminal during scripts/demo, in tmux
    python scripts/pictures.py memory        memory.svg: the memory map of a step, by `plan --svg`
    python scripts/pictures.py report        report.png: the page of a run, in chromium
    python scripts/pictures.py ui            ui.png: the page of `llamatrain ui`, in chromium

The demo runs in the environment of this script.
"""

import argparse
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "scripts" / "pictures"
COLUMNS, LINES = 92, 26  # of the terminal
PROGRESS = re.compile(r"(\d+)/1000  [\d,]+ tok/s")  # of the display
FACES = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEME = TerminalTheme(
    (20, 24, 31),
    (222, 228, 235),
    [
        (20, 24, 31),
        (238, 138, 91),
        (87, 197, 150),
        (240, 196, 98),
        (110, 168, 245),
        (178, 146, 236),
        (76, 195, 212),
        (222, 228, 235),
    ],
    [
        (110, 122, 138),
        (255, 160, 120),
        (120, 220, 175),
        (255, 215, 130),
        (140, 190, 255),
        (200, 170, 250),
        (110, 215, 230),
        (255, 255, 255),
    ],
)
SMALL = (
    "--embd",
    "128",
    "--head",
    "4",
    "--layer",
    "4",
    "--vocab-size",
    "1024",
    "--batch",
    "16",
    "--seed",
    "1",
)
OFTEN = (
    "--val-split",
    "0.05",
    "--eval-every",
    "50",
    "--sample-every",
    "200",
    "--sample-prompt",
    "def ",
    "--iters",
    "500",
)
ANSWERS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("And of Italy?", "The capital of Italy is Rome."),
    ("Is Lyon a capital?", "No, it is a city in France."),
)
PAGE = (1120, 1195)
UI = (1120, 900)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
)


def find_program(name: str, *others: str) -> str:
    """Return the path of a program by one of its names; exit if none is installed."""
    path = next(filter(None, map(shutil.which, (name, *others))), None)
    if not path:
        raise SystemExit(f"error: {name} was not found; apt-get install {name}")
    return path


def run_llamatrain(*words: str | Path, folder: Path) -> None:
    """Run the command in a folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    subprocess.run(
        [sys.executable, "-m", "llamatrain", *map(str, words)], cwd=folder, env=environment, check=True
    )


# ---- the demo's terminal ---------------------------------------------------


@contextmanager
def terminal(folder: Path) -> Iterator[Callable[..., str]]:
    """Start a shell in tmux, and yield a function that runs a command of tmux and returns its output."""
    command = [find_program("tmux"), "-S", str(folder / "tmux")]
    environment = {**os.environ, "PS1": "$ ", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}

    def tmux(*words: str, check: bool = True) -> str:
        done = subprocess.run(
            [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, check=check
        )
        return done.stdout if done.returncode == 0 else ""

    tmux("-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), "sh")
    try:
        yield tmux
    finally:
        tmux("send-keys", "C-c")
        tmux("send-keys", "exit", "Enter")
        end = time.monotonic() + 30
        while tmux("list-sessions", check=False) and time.monotonic() < end:
            time.sleep(0.1)
        tmux("kill-server", check=False)


def wait_for_wave(tmux: Callable[..., str]) -> str:
    """Return the terminal's content at step 130, when the wave is nearly learned."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        content = tmux("capture-pane", "-p", "-e")
        if (progress := PROGRESS.search(Text.from_ansi(content).plain)) and int(progress[1]) > 130:
            return content
        time.sleep(0.1)
    raise SystemExit("error: the demo did not reach step 130 within 300 s")


def demo(folder: Path) -> None:
    """Draw the terminal during scripts/demo, in the present environment."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / ".venv").symlink_to(sys.prefix)
    with terminal(folder) as tmux:
        tmux("send-keys", "clear; scripts/demo", "Enter")
        content = wait_for_wave(tmux)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(content.rstrip()), soft_wrap=True)
    svg = console.export_svg(title="scripts/demo", theme=THEME, unique_id="demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", FACES)
    (PICTURES / "demo.svg").write_text(
        "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"
    )


# ---- the memory map --------------------------------------------------------


def memory(folder: Path) -> None:
    """Draw the memory map of a step."""
    (folder / "TEXT.txt").write_text("the plan does not read this text\n")
    run_llamatrain(
        "plan",
        "from-scratch",
        "TEXT.txt",
        "--size",
        "small",
        "--svg",
        PICTURES / "memory.svg",
        "--overwrite",
        folder=folder,
    )


# ---- the page of a run -----------------------------------------------------


def report(folder: Path) -> None:
    """Take a picture of the page of a run."""
    chromium = find_program("chromium", "chromium-browser", "google-chrome")
    sources = sorted(map(str, (ROOT / "llamatrain").rglob("*.py")))
    (folder / "sources.txt").write_text("".join(Path(source).read_text() for source in sources))
    run_llamatrain(
        "from-scratch", "sources.txt", "--as", "text", *SMALL, *OFTEN, "--out", "runs/sources", folder=folder
    )
    picture = PICTURES / "report.png"
    size = f"--window-size={PAGE[0]},{PAGE[1]}"
    scheme = "--blink-settings=preferredColorScheme=1"
    profile = f"--user-data-dir={folder / 'profile'}"
    page = (folder / "runs" / "sources" / "report.html").as_uri()
    subprocess.run(
        [chromium, *QUIET, size, scheme, profile, f"--screenshot={picture}", page],
        capture_output=True,
        check=True,
    )


def ui(folder: Path) -> None:
    """Take a picture of the page of `llamatrain ui` before a run: files, options, plan and rows."""
    from tests.helpers.browser import browser
    from tests.helpers.ui_client import served

    work = folder / "work"
    work.mkdir()
    shutil.copy(ROOT / "docs" / "GUIDE.md", work / "guide.txt")
    rows = [{"prompt": ask, "completion": tell} for ask, tell in ANSWERS]
    (work / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--vocab-size", "2048", "--size", "small", "--iters", "1", "--out", "runs/base")
    run_llamatrain("from-scratch", "guide.txt", *words, folder=work)
    (work / "runs" / "base" / "model.gguf").rename(work / "base.gguf")
    with served(work) as client, browser(folder / "profile") as page:
        page.show(*UI)
        page.open(client.url)
        page.wait("!$('new').hidden && $('basic').children.length")
        page.run("document.querySelector('[aria-label=\"Choose the model base.gguf\"]').click()")
        page.run("document.querySelector('[aria-label=\"Add the data capitals.jsonl\"]').click()")
        for button, result in (("plan", "plan-result"), ("preview", "rows")):
            page.run(f"$('{button}').click()")
            page.wait(f"!$('{result}').hidden && !$('{button}').disabled")
        page.picture(PICTURES / "ui.png")


KINDS = {"demo": demo, "memory": memory, "report": report, "ui": ui}


def main() -> None:
    """Make the pictures that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    kinds = parser.parse_args().kinds or [*KINDS]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"unknown picture {shlex.join(unknown)}; choose from {', '.join(KINDS)}")
    PICTURES.mkdir(exist_ok=True)
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
            KINDS[kind](Path(folder))


if __name__ == "__main__":
    main()
