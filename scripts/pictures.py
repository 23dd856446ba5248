"""Makes README's pictures, in scripts/pictures: what is on them was run for it.

    python scripts/pictures.py               all of them, in two or three minutes
    python scripts/pictures.py demo          demo.svg: a terminal in the middle of scripts/demo, as tmux has it
    python scripts/pictures.py memory        memory.svg: the memory map of a step, as `plan --svg` draws it
    python scripts/pictures.py report        report.png: the page of a run on the package's own sources, as chromium shows it

The demo takes the environment that this runs in as its own.
"""

import argparse
import io
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
PART = re.compile(r"(\d+)/1000  [\d,]+ tok/s")  # of the display: how far it is
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
PAGE = (1120, 1195)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
)


def program(name: str, *others: str) -> str:
    found = next(filter(None, map(shutil.which, (name, *others))), None)
    if not found:
        raise SystemExit(f"error: there is no {name}: apt-get install {name}")
    return found


def llamatrain(*words: str | Path, at: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    subprocess.run(
        [sys.executable, "-m", "llamatrain", *map(str, words)], cwd=at, env=environment, check=True
    )


# ---- the demo's terminal ---------------------------------------------------


@contextmanager
def terminal(folder: Path) -> Iterator[Callable[..., str]]:
    """A shell in a terminal of tmux, which is spoken to and looked at by its words."""
    command = [program("tmux"), "-S", str(folder / "tmux")]
    environment = {**os.environ, "PS1": "$ ", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}

    def said(*words: str, check: bool = True) -> str:
        done = subprocess.run(
            [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, check=check
        )
        return done.stdout if done.returncode == 0 else ""

    said("-f", "/dev/null", "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), "sh")
    try:
        yield said
    finally:
        said("send-keys", "C-c")
        said("send-keys", "exit", "Enter")
        end = time.monotonic() + 30
        while said("list-sessions", check=False) and time.monotonic() < end:
            time.sleep(0.1)
        said("kill-server", check=False)


def seen(said: Callable[..., str]) -> str:
    """The terminal as soon as the wave is nearly there."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        shown = said("capture-pane", "-p", "-e")
        if (part := PART.search(Text.from_ansi(shown).plain)) and int(part[1]) > 130:
            return shown
        time.sleep(0.1)
    raise SystemExit("error: the demo did not get so far")


def demo(folder: Path) -> None:
    """scripts/demo as a clone has it, in an environment that is there."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / ".venv").symlink_to(sys.prefix)
    with terminal(folder) as said:
        said("send-keys", "clear; scripts/demo", "Enter")
        shown = seen(said)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()), soft_wrap=True)
    made = console.export_svg(title="scripts/demo", theme=THEME, unique_id="demo")
    made = re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.DOTALL).replace("Fira Code, monospace", FACES)
    (PICTURES / "demo.svg").write_text(
        "\n".join(line.rstrip() for line in made.splitlines() if line.strip()) + "\n"
    )


# ---- the memory map --------------------------------------------------------


def memory(folder: Path) -> None:
    (folder / "TEXT.txt").write_text("text is not read for a plan\n")
    llamatrain(
        "plan",
        "from-scratch",
        "TEXT.txt",
        "--size",
        "small",
        "--svg",
        PICTURES / "memory.svg",
        "--overwrite",
        at=folder,
    )


# ---- the page of a run -----------------------------------------------------


def report(folder: Path) -> None:
    chromium = program("chromium", "chromium-browser", "google-chrome")
    sources = sorted(map(str, (ROOT / "llamatrain").rglob("*.py")))
    (folder / "sources.txt").write_text("".join(Path(source).read_text() for source in sources))
    llamatrain(
        "from-scratch", "sources.txt", "--as", "text", *SMALL, *OFTEN, "--out", "runs/sources", at=folder
    )
    shot, size = PICTURES / "report.png", f"--window-size={PAGE[0]},{PAGE[1]}"
    scheme, profile = "--blink-settings=preferredColorScheme=1", f"--user-data-dir={folder / 'profile'}"
    page = (folder / "runs" / "sources" / "report.html").as_uri()
    subprocess.run(
        [chromium, *QUIET, size, scheme, profile, f"--screenshot={shot}", page],
        capture_output=True,
        check=True,
    )


KINDS = {"demo": demo, "memory": memory, "report": report}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    kinds = parser.parse_args().kinds or [*KINDS]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"{shlex.join(unknown)}: there are {', '.join(KINDS)}")
    PICTURES.mkdir(exist_ok=True)
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
            KINDS[kind](Path(folder))


if __name__ == "__main__":
    main()
