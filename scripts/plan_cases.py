"""Compares the memory that `plan` expects of runs with what they take, each in its own process.

    python scripts/plan_cases.py [--limit] [WORD ...]    cases whose names contain a word; or all

A case is bad if the peak of the run's process is above the plan, or more than 5 % below it; with `--limit`
also if a run is refused that may take exactly the planned memory. Peaks are VmHWM; the peak of all processes
together is the largest sum of resident memory, sampled every few milliseconds. Cases share compiled kernels,
but not the token cache.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.processes import MEASURED_PROGRAM, ROOT

from tests.helpers.lora_runs import base
from tests.helpers.small_models import small

SHARE = 0.05
POLL_SECONDS = 0.004  # between two samples of the processes


@dataclass(frozen=True)
class Case:
    """A run to compare."""

    name: str
    words: tuple[str, ...]  # options
    data: tuple[str, ...] = ("text.txt",)
    base: str = ""  # the type of a base's weights; empty for from-scratch
    warm: bool = False  # the token cache has the data
    resumed: bool = False  # measure a resumed run
    steps: int = 3

    @property
    def command(self) -> str:
        """The command that the case runs."""
        return "finetune" if self.base else "from-scratch"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a run, and its peaks in bytes."""

    code: int
    peak: int  # of the process
    total: int  # of the process and its descendants
    out: str
    err: str


# ---- the cases -------------------------------------------------------------

TINY = ("--embd", "64", "--head", "4", "--layer", "4", "--ff", "192")
SMALL = ("--embd", "256", "--head", "8", "--layer", "6", "--ff", "768")
MEDIUM = ("--embd", "512", "--head", "8", "--layer", "8", "--ff", "1376", "--vocab-size", "bytes")
BYTES, F32, HALF = ("--vocab-size", "bytes"), ("--precision", "f32"), ("--precision", "bf16")


def size_cases() -> Iterator[Case]:
    """Yield cases of model sizes, context lengths and precisions."""
    for name, size in (("tiny", (*TINY, *BYTES)), ("small", (*SMALL, *BYTES)), ("medium", MEDIUM)):
        for precision in (F32, HALF):
            for ctx, batch in ((64, 8), (512, 2), (1024, 1), (2048, 1)):
                if name != "medium" or ctx < 2048:
                    for flash in ((), ("--no-flash",)):
                        words = (*size, *precision, "--ctx", str(ctx), "--batch", str(batch), *flash)
                        yield Case(f"{name} {precision[1]} ctx{ctx}{' plain' if flash else ''}", words)


def option_cases() -> Iterator[Case]:
    """Yield cases of recomputation, optimizers, validation and samples."""
    some = (*SMALL, *BYTES, "--ctx", "256", "--batch", "4")
    for how in ("none", "light", "block", "optimal", "3", "products:2,wide:2", "segment:3,block:2"):
        yield Case(f"remat {how}", (*some, *HALF, "--remat", how))
    for most in ("250MB", "205MB", "190MB"):
        yield Case(f"remat auto within {most}", (*some, *F32, "--memory", most))
    yield Case("batch 32", (*some, *F32, "--batch", "32"))
    yield Case("accumulated", (*some, *F32, "--grad-acc", "4"))
    yield Case("streamed", (*some, *F32, "--clip", "0"))
    yield Case("streamed medium", (*MEDIUM, *HALF, "--ctx", "256", "--clip", "0"))
    for history in (1, 5, 20):
        yield Case(
            f"lbfgs {history}",
            (*some, *F32, "--optimizer", "lbfgs", "--lbfgs-history", str(history)),
            steps=history + 4,
        )
    yield Case(
        "lbfgs plain ctx512", (*some, *F32, "--optimizer", "lbfgs", "--no-flash", "--ctx", "512"), steps=9
    )
    yield Case("sgd", (*some, *F32, "--optimizer", "sgd"))
    yield Case("muon", (*some, *F32, "--optimizer", "muon"))
    yield Case("muon accumulated", (*some, *HALF, "--optimizer", "muon", "--grad-acc", "2"))
    yield Case("muon medium", (*MEDIUM, *HALF, "--ctx", "256", "--optimizer", "muon"))
    yield Case("muon streamed", (*MEDIUM, *F32, "--ctx", "64", "--optimizer", "muon", "--clip", "0"))
    yield Case("muon deep", (*TINY, *BYTES, "--layer", "128", *F32, "--ctx", "64", "--optimizer", "muon"))
    yield Case("validated", (*some, *F32, "--val-split", "0.1", "--eval-every", "1"))
    yield Case(
        "validated plain",
        (*some, *F32, "--val-split", "0.1", "--eval-every", "1", "--no-flash", "--ctx", "512"),
    )
    yield Case("sampled", (*some, *F32, "--sample-every", "1", "--sample-prompt", "a"))
    yield Case("sampled bf16", (*some, *HALF, "--sample-every", "1", "--sample-prompt", "a"))
    yield Case("saved often", (*MEDIUM, *HALF, "--ctx", "64", "--save-every", "1"))
    for name, words in (("", ()), (" lbfgs", ("--optimizer", "lbfgs")), (" medium", MEDIUM)):
        yield Case(f"resumed{name}", (*SMALL, *BYTES, "--ctx", "128", *F32, *words), resumed=True)


def data_cases() -> Iterator[Case]:
    """Yield cases of data and vocabularies."""
    yield Case("sine", (*TINY, *F32), data=())
    yield Case("sine medium", (*MEDIUM[:-2], *HALF, "--ctx", "256"), data=())
    yield Case("deep", (*TINY, *BYTES, "--layer", "128", *F32, "--ctx", "64"))
    yield Case("deep recomputed", (*TINY, *BYTES, "--layer", "64", *F32, "--ctx", "64", "--remat", "block"))
    for megabytes in (2, 20, 50):
        named = (f"{megabytes}MB.txt",)
        for kind in ("bytes", "2000", "8000"):
            yield Case(f"{megabytes}MB vocabulary {kind}", (*TINY, "--vocab-size", kind, *F32), data=named)
        yield Case(f"{megabytes}MB vocabulary bytes warm", (*TINY, *BYTES, *F32), data=named, warm=True)
    yield Case("2MB vocabulary 30000 small", (*SMALL, "--vocab-size", "30000", *HALF), data=("2MB.txt",))
    yield Case("2MB vocabulary from", (*TINY, "--vocab-from", "F32.gguf", *F32), data=("2MB.txt",))
    for name, words in (("prompts", ()), ("chats", ()), ("chats packed", ("--pack",))):
        yield Case(name, (*SMALL, *BYTES, *F32, "--ctx", "256", *words), data=(f"{name.split()[0]}.jsonl",))
    yield Case("samples", (*SMALL, *BYTES, *F32, "--ctx", "256", "--sample-start", "."))
    yield Case("20MB samples overlapping", (*TINY, *BYTES, *F32, "--overlapping-samples"), data=("20MB.txt",))
    yield Case("20MB prompts", (*TINY, *BYTES, *F32, "--ctx", "128"), data=("20MB.jsonl",))


def hybrid_cases() -> Iterator[Case]:
    """Yield cases of architectures with recurrent blocks, whose memory is linear in the context."""
    for arch in ("qwen35", "granitehybrid", "lfm2"):
        for ctx in (512, 1024, 2048, 4096):
            words = ("--arch", arch, *SMALL, *BYTES, *F32, "--ctx", str(ctx), "--batch", "1")
            yield Case(f"hybrid {arch} ctx{ctx}", words)


def finetune_cases() -> Iterator[Case]:
    """Yield cases of finetune."""
    some = ("--ctx", "256", "--batch", "2")
    for kind in ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ3_S"):
        for words in (("--cache-base", "off", *HALF), ("--cache-base", "bf16", *HALF), F32):
            yield Case(f"adapter {kind} {' '.join(words[1::2])}", (*some, *words), base=kind)
    for kind in ("F32", "F16"):
        yield Case(f"full {kind}", (*some, *HALF, "--full"), base=kind)
    yield Case("full f32 plain", (*some, *F32, "--full", "--no-flash", "--ctx", "512"), base="F32")
    yield Case("adapter plain", (*some, *HALF, "--no-flash", "--ctx", "512"), base="Q4_0")
    yield Case("adapter block", (*some, *HALF, "--remat", "block"), base="Q4_0")
    yield Case(
        "adapter sampled", (*some, *HALF, "--sample-every", "1", "--sample-prompt", "some"), base="Q4_0"
    )
    yield Case("adapter validated", (*some, *HALF, "--val-split", "0.1", "--eval-every", "1"), base="Q4_0")
    for precision in (F32, HALF):
        yield Case(
            f"adapter taught {precision[1]}", (*some, *precision, "--teacher", "Q4_0.gguf"), base="Q4_0"
        )
    yield Case("adapter lbfgs", (*some, *F32, "--optimizer", "lbfgs"), base="Q4_0", steps=9)
    yield Case("adapter chats", (*some, *HALF), base="Q4_0", data=("chats.jsonl",))
    for objective in ("orpo", "dpo", "simpo"):
        yield Case(
            f"adapter {objective}",
            (*some, *HALF, "--objective", objective),
            base="Q4_0",
            data=("pairs.jsonl",),
        )
    short = ("--ctx", "64", "--batch", "8")  # all answers fill it
    yield Case("adapter kto", (*short, *HALF, "--objective", "kto"), base="Q4_0", data=("pairs.jsonl",))
    yield Case(
        "full simpo", (*some, *HALF, "--full", "--objective", "simpo"), base="F32", data=("pairs.jsonl",)
    )
    yield Case("full chats", (*some, *HALF, "--full"), base="F32", data=("chats.jsonl",))
    yield Case("adapter resumed", (*some, *HALF), base="Q4_0", resumed=True)
    yield Case("full resumed", (*some, *HALF, "--full"), base="F32", resumed=True)


# ---- files ----------------------------------------------------------------


def make_sentences(size: int) -> Iterator[str]:
    """Yield lines of a synthetic text."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20000)]
    length = 0
    while length < size:
        line = " ".join(rng.choices(words[:200], k=7) + rng.choices(words, k=5)) + ".\n"
        length += len(line)
        yield line


def make_json_lines(kind: str, size: int) -> Iterator[str]:
    """Yield chats, preference pairs or prompts as JSON."""
    rng = random.Random(2)
    for line in make_sentences(size):
        text = (line * rng.choice((1, 1, 2, 4))).strip().replace("\n", " ")
        half = len(text) // 2
        turns = [{"role": "user", "content": text[:half]}, {"role": "assistant", "content": text[half:]}]
        pair = {"prompt": text[:half], "chosen": text[half:], "rejected": text[half + 5 :]}
        prompt = {"prompt": text[:half], "completion": text[half:]}
        yield json.dumps({"chats": {"messages": turns}, "pairs": pair}.get(kind, prompt)) + "\n"


def make_file(folder: Path, name: str) -> Path:
    """Return the path of a model or of data; make the file if it does not exist."""
    path = folder / name
    if path.exists():
        return path
    if path.suffix == ".gguf":
        return base(
            path, small(embd=512, heads=8, head_size=64, ff=1536, layers=8, vocab=8192, ctx=2048), path.stem
        )
    size = int(name[: name.index("MB")]) * 10**6 if "MB" in name else 300_000
    with path.open("w") as out:
        is_text = path.suffix == ".txt"
        out.writelines(make_sentences(size) if is_text else make_json_lines(path.stem, size))
    return path


# ---- measuring -------------------------------------------------------------


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def list_family(process: int) -> list[int]:
    """Return a process and its descendants."""
    family = [process]
    for member in family:
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):
                family += map(int, path.read_text().split())
    return family


def run_measured(words: list[str], environment: dict[str, str]) -> Measurement:
    """Run the command and measure its memory."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", MEASURED_PROGRAM, *words],
            env=environment,
            stdout=out,
            stderr=err,
            text=True,
        )
        total = 0
        while process.poll() is None:
            total = max(total, sum(map(resident_bytes, list_family(process.pid))))
            time.sleep(POLL_SECONDS)
        out.seek(0)
        err.seek(0)
        errors = err.read()
        match = re.search(r"VmHWM (\d+)", errors)
        peak = int(match[1]) * 1024 if match else 0
        return Measurement(
            code=process.returncode, peak=peak, total=max(peak, total), out=out.read(), err=errors
        )


@dataclass
class Bench:
    """Runs cases in a folder."""

    folder: Path
    limited: bool
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create a cache for these runs."""
        cache = self.folder / "cache"
        cache.mkdir(exist_ok=True)
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLAMATRAIN_CACHE": str(cache)}

    def clear_tokens(self) -> None:
        """Remove the cache of tokens."""
        shutil.rmtree(self.folder / "cache" / "llamatrain" / "tokens", ignore_errors=True)

    def start(self, case: Case, words: list[str], out: Path) -> Measurement:
        """Run a case from its first step."""
        return run_measured(
            [case.command, *words, "--out", str(out), "--overwrite", "--report-every", "1"], self.environment
        )

    def run(self, case: Case) -> str:
        """Run a case and return its line of the table; BAD is at its end if it is."""
        bases = [f"{case.base}.gguf"] if case.base else []
        files = [make_file(self.folder, name) for name in (*bases, *case.data)]
        words = [
            *map(str, files),
            *(str(make_file(self.folder, word)) if word.endswith(".gguf") else word for word in case.words),
        ]
        words += ["--iters", str(case.steps)]
        out = self.folder / "run"
        self.clear_tokens()
        if case.warm or case.resumed:
            self.start(case, words, out)
        if case.resumed:
            words = [*map(str, files[: len(bases)]), "--resume", str(out), "--iters", str(case.steps + 3)]
        plan = run_measured(["plan", case.command, *words, "--json"], self.environment)
        if plan.code:
            return f"{case.name:34} {plan.err.splitlines()[0][:150]}  BAD"
        total = json.loads(plan.out)["total"]
        if self.limited:
            words += ["--memory", str(total)]
        done = (
            run_measured([case.command, *words], self.environment)
            if case.resumed
            else self.start(case, words, out)
        )
        if "compiled" in done.err and not case.resumed:  # compilers take memory, too
            return self.run(case)
        return format_line(case, total, done)


def format_line(case: Case, planned: int, done: Measurement) -> str:
    """Return a line of the table."""
    difference = planned / done.peak - 1 if done.peak else 0
    bad = done.code or done.peak > planned or difference > SHARE
    figures = f"{planned / 1e6:9.1f} {done.peak / 1e6:9.1f} {difference:8.1%} {done.total / 1e6:9.1f}"
    error = ""
    if done.code:
        error = "".join(line for line in done.err.splitlines() if line.startswith("error:"))[:150]
    excess = "" if done.total <= max(planned, done.peak) else "  with children BEYOND"
    return f"{case.name:34} {figures} {error}{'  BAD' if bad else ''}{excess}"


def main() -> int:
    """Run the cases and print a table; return 1 if one is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "plan_cases")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.folder, args.limit)
    bad = 0
    print(f"{'':34} {'planned':>9} {'peak':>9} {'off':>8} {'all':>9}")
    for case in (*size_cases(), *option_cases(), *data_cases(), *hybrid_cases(), *finetune_cases()):
        if not args.words or any(word in case.name for word in args.words):
            line = bench.run(case)
            bad += "BAD" in line
            print(line, flush=True)
    print(f"{bad} bad")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
