"""Times training on a GPU in turns with torch, and with PEFT on a base in 4 bits: `bench.py gpu`.

    python scripts/bench.py gpu 7b:1024x4 M:256x64    adapters of a 7b base in Q4_K, and a new model

A case is NAME:CTXxBATCH. S and M are new models, trained by `llamatrain from-scratch`; the others are bases
with random weights, for which `llamatrain finetune` trains an adapter. The peers of a new model are eager,
compiled and graphs; those of an adapter are eager, blocks and compiled, each with +bf16, +autocast or
+checkpointing (see peers/). FLOP/s are those of the model's products: what is computed twice counts once.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_model import make_vocabulary

from bench.finetune import add_peer_arguments
from bench.processes import PEERS, ROOT, make_random_model
from bench.random_models import SIZES, Size
from bench.shapes import FAMILIES, SHAPES
from llamatrain.gguf import quants
from llamatrain.gguf.rewrite import file_type
from llamatrain.gguf.types import GgmlType, TensorInfo, type_by_name
from llamatrain.gguf.values import u32
from llamatrain.gguf.writer import create_gguf

CASES = ["M:256x64", "1.1b:1024x8", "7b:1024x4"]
NEW_MODELS = {name: SIZES[name] for name in ("S", "M")}
NEW_PEERS = ("eager", "compiled", "graphs")
ADAPTER_PEERS = ("eager", "eager+bf16", "compiled+bf16")
WARM_UP = 3  # steps of our runs that are not counted
PIECE_ROWS = 512  # of a base's matrix, repeated to its end
FULL, ADAPTER = 3, 2  # products with each weight: forward, by its input's gradient, by its own gradient
PEAK_PROGRAM = """
import json, statistics, torch
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
times = []
for _ in range(30):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(); torch.mm(a, b); end.record(); torch.cuda.synchronize()
    times.append(start.elapsed_time(end) / 1e3)
properties = torch.cuda.get_device_properties(0)
flops = 2 * 8192 ** 3 / statistics.median(times[10:])
print(json.dumps({"name": properties.name, "memory": properties.total_memory, "flops": flops,
                  "torch": torch.__version__}))
"""


class FailedRun(Exception):
    """A run did not end well."""


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    name: str
    size: Size

    @property
    def is_new(self) -> bool:
        """True if the whole model is trained."""
        return self.name in NEW_MODELS

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.size.ctx * self.size.batch

    @property
    def flops(self) -> float:
        """The operations of a step, without embeddings, norms and the adapter."""
        size = self.size
        kv = size.width // size.heads * size.kv_heads
        block = 2 * size.width * (size.width + kv) + 3 * size.width * size.ff
        weights = size.layers * block + size.width * size.vocab
        attention = 2 * size.ctx * size.width * size.layers  # forward, for a token; half of it is masked
        return self.tokens * (2 * (FULL if self.is_new else ADAPTER) * weights + 3 * attention)

    def __str__(self) -> str:
        return f"{self.name}:{self.size.ctx}x{self.size.batch}"


@dataclass
class Result:
    """The measurements of a run."""

    seconds: list[float]
    peak: int = 0  # bytes of the device; 0 if unknown
    planned: int = 0


@dataclass
class Contender:
    """A kind of run, and what was measured in its rounds."""

    name: str
    run: Callable[[], Result]
    results: list[Result] = field(default_factory=list)
    problem: str = ""

    @property
    def seconds(self) -> list[float]:
        """The seconds of all steps."""
        return [seconds for result in self.results for seconds in result.seconds]

    def run_round(self) -> None:
        """Run once and add what was measured; a failed contender does not run again."""
        if self.problem:
            return
        print(f"{self.name} ...", end=" ", file=sys.stderr, flush=True)
        try:
            self.results.append(self.run())
            print(f"{median(self.seconds):.4f} s", file=sys.stderr, flush=True)
        except FailedRun as error:
            self.problem = str(error)
            print(f"failed:\n{error}", file=sys.stderr, flush=True)


def parse_case(word: str) -> Case:
    """Parse NAME:CTXxBATCH."""
    name, _, rows = word.partition(":")
    try:
        ctx, batch = map(int, rows.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not of the form NAME:CTXxBATCH") from None
    if name in NEW_MODELS:
        return Case(name, replace(NEW_MODELS[name], ctx=ctx, batch=batch))
    if name not in SHAPES or name in FAMILIES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join([*NEW_MODELS, *SHAPES])}")
    embd, layers, heads, kv_heads, ff, vocab, _ = SHAPES[name]
    return Case(name, Size(vocab, embd, layers, heads, kv_heads, ff, ctx, batch))


def run_limited(words: list[object], limit: float) -> str:
    """Run a program for at most this many seconds and return its standard output."""
    command = list(map(str, words))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=limit, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        raise FailedRun(f"{said[-1000:]}\nstopped after {limit:g} s") from None
    if done.returncode:
        raise FailedRun(f"{shlex.join(command)}\n{done.stderr[-3000:].strip()}")
    return done.stdout


def repeat_piece(info: TensorInfo, pieces: dict[int, np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the bytes of a matrix: the same encoded rows over and over."""
    rows, columns = info.shape
    if columns not in pieces:
        values = np.random.default_rng(columns).standard_normal((PIECE_ROWS, columns), np.float32)
        pieces[columns] = quants.encode(values * np.float32(0.5 / columns**0.5), info.type)
    for first in range(0, rows, PIECE_ROWS):
        yield pieces[columns][: rows - first]


def write_base(path: Path, case: Case, kind: GgmlType) -> None:
    """Write a model with random weights that repeat: a large one in seconds."""
    h = replace(case.size, ctx=max(case.size.ctx, 512)).h
    infos = [
        TensorInfo(name, kind if h.is_matrix(name) else type_by_name("F32"), shape)
        for name, shape in h.shapes.items()
    ]
    keys = h.metadata(f"random {kind.name}") | make_vocabulary(h.vocab)
    pieces: dict[int, np.ndarray] = {}
    with create_gguf(path, keys | {"general.file_type": u32(file_type(kind))}, infos) as out:
        for info in infos:
            matrix = h.is_matrix(info.name)
            out.write(info.name, repeat_piece(info, pieces) if matrix else np.ones(info.shape, np.float32))


def write_text(path: Path, case: Case) -> None:
    """Write random letters, of which each is a token, for many steps."""
    letters = np.frombuffer(b"abcdefgh ", np.uint8)
    path.write_bytes(np.random.default_rng(0).choice(letters, 32 * case.tokens).tobytes())


def command_words(case: Case, kind: str, folder: Path) -> list[object]:
    """Return the command that trains the model, after writing the files that it reads."""
    text, size = folder / "text.txt", case.size
    write_text(text, case)
    if not case.is_new:
        base = folder / f"{case.name}.gguf"
        if not base.exists():
            write_base(base, case, type_by_name(kind.upper()))
        return ["finetune", base, text, "--cache-base", "off"]
    vocabulary = folder / "vocabulary.gguf"
    options = ["--embd", 32, "--layer", 1, "--head", 1, "--head-kv", 1, "--ff", 32, "--vocab", size.vocab]
    if not vocabulary.exists():
        make_random_model(vocabulary, *options, "--type", "f32")
    words: list[object] = ["from-scratch", text, "--vocab-from", vocabulary]
    words += ["--embd", size.width, "--layer", size.layers, "--head", size.heads]
    return [*words, "--head-kv", size.kv_heads, "--ff", size.ff]


def read_metrics(path: Path) -> Result:
    """Return what a run wrote about its steps and about the device's memory."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[str, Any] = {}
    for line in lines:
        found |= {key: value for key, value in line.items() if key.startswith("device_")}
    seconds = [line["seconds"] for line in lines if "grad_norm" in line][WARM_UP:]
    return Result(seconds, int(found.get("device_peak_bytes", 0)))


def build_ours(
    case: Case, words: list[object], options: str, folder: Path, args: argparse.Namespace
) -> Contender:
    """Return a run of llamatrain with these further options."""
    out = folder / "run"
    program: list[object] = [sys.executable, "-m", "llamatrain"]
    more = ["--out", out, "--overwrite", "--quiet", "--save-every", 0, "--eval-every", 0]
    common: list[object] = ["--ctx", case.size.ctx, "--batch", case.size.batch, "--precision", "bf16"]
    common += ["--iters", WARM_UP + args.steps]
    if args.device != "none":
        common += ["--device", args.device]

    def run() -> Result:
        settings = [*common, *shlex.split(options)]
        plan = run_limited([*program, "plan", *words, *settings, "--json"], args.limit)
        run_limited([*program, *words, *settings, *more], args.limit)
        return replace(read_metrics(out / "metrics.jsonl"), planned=json.loads(plan)["total"])

    kind = "new" if case.is_new else args.type
    return Contender(f"{kind} {options}".strip(), run)


def build_peer(case: Case, mode: str, args: argparse.Namespace) -> Contender:
    """Return a run of torch, or of PEFT: in a mode such as eager+bf16+checkpointing."""
    size = case.size
    mode_name, *extras = mode.split("+")
    if case.is_new:
        sizes = [size.width, size.layers, size.heads, size.kv_heads, size.ff, size.vocab]
        words = [PEERS / "torch_gpu_step.py", *sizes, size.ctx, size.batch, mode_name, args.steps]
    else:
        words = [PEERS / "peft_gpu_step.py", case.name, size.ctx, size.batch, mode_name, args.steps]
        words += ["--base", args.peer_base]
        for extra in extras:
            words += ["--checkpointing"] if extra == "checkpointing" else ["--adapter", extra]
    words += ["--device", args.peer_device]

    def run() -> Result:
        result = json.loads(run_limited([args.peer, *words], args.limit).splitlines()[-1])
        return Result(result["seconds"], result["peak"])

    return Contender(f"{'torch' if case.is_new else 'peft'} {mode}", run)


def measure_card(args: argparse.Namespace) -> dict[str, Any]:
    """Return the name of the GPU and its speed on large products in bf16."""
    try:
        card: dict[str, Any] = json.loads(run_limited([args.peer, "-c", PEAK_PROGRAM], 120))
    except FailedRun as error:
        print(f"no GPU was measured: {str(error).splitlines()[-1]}", file=sys.stderr)
        return {"name": "no GPU", "flops": 0.0, "memory": 0, "torch": "-"}
    return card


def run_case(case: Case, args: argparse.Namespace) -> tuple[list[Contender], list[Contender]]:
    """Return our contenders of a case and its peers, after all rounds."""
    modes = args.new_peers if case.is_new else args.adapter_peers
    peers = [build_peer(case, mode, args) for mode in modes] if args.torch else []
    print(f"\n{case}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours: list[Contender] = []
        if args.ours_too:
            words = command_words(case, args.type, folder)
            ours = [build_ours(case, words, options, folder, args) for options in args.ours or [""]]
        for _ in range(args.rounds):
            for contender in (*ours, *peers):
                contender.run_round()
    return ours, peers


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in GB."""
    return f"{nbytes / 1e9:9.2f}" if nbytes else f"{'-':>9}"


def format_row(contender: Contender, case: Case, best_peer: float, card_flops: float) -> str:
    """Return a line of the table; `best_peer` is the time of the fastest peer's step, 0 if there is none."""
    if not contender.seconds:
        return f"{contender.name:30} failed: {(contender.problem.splitlines() or ['no step'])[-1][:120]}"
    middle = median(contender.seconds)
    low, high = case.tokens / max(contender.seconds), case.tokens / min(contender.seconds)
    peak, planned = (max(getattr(result, key) for result in contender.results) for key in ("peak", "planned"))
    share = f"{case.flops / middle / card_flops:7.1%}" if card_flops else f"{'-':>7}"
    ratio = f"{best_peer / middle:7.2f}" if best_peer else f"{'-':>7}"
    speed = f"{case.tokens / middle:10,.0f} {f'{low:,.0f}..{high:,.0f}':>20} {middle * 1e3:9.1f}"
    memory = f"{format_bytes(peak)} {format_bytes(planned)}"
    return f"{contender.name:30} {speed} {memory} {case.flops / middle / 1e12:8.1f} {share} {ratio}"


def print_case(case: Case, ours: list[Contender], peers: list[Contender], card: dict[str, Any]) -> None:
    """Print the table of a case."""
    what = "a new model" if case.is_new else "rank 8 on all linear weights"
    best = min((median(peer.seconds) for peer in peers if peer.seconds), default=0.0)
    columns = f"{'tokens/s':>10} {'slowest..fastest':>20} {'ms/step':>9} {'peak GB':>9} {'plan GB':>9}"
    print(f"\n{case}, {what}, {case.tokens:,} tokens and {case.flops / 1e12:.2f} TFLOP a step")
    print(f"{'run':30} {columns} {'TFLOP/s':>8} {'of card':>7} {'x peer':>7}")
    for contender in (*ours, *peers):
        print(format_row(contender, case, best, card["flops"]))
    sys.stdout.flush()


def describe_results(case: Case, contender: Contender) -> str:
    """Return what was measured as a line of JSON."""
    results = [vars(result) for result in contender.results]
    return json.dumps(
        {"case": str(case), "run": contender.name, "results": results, "problem": contender.problem}
    )


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `gpu`."""
    command.add_argument("cases", nargs="*", type=parse_case, metavar="CASE", help=f"default: {CASES}")
    command.add_argument("--type", default="q4_k", help="of the base's weights")
    command.add_argument("--device", default="cuda", help="of llamatrain; none: leave the option out")
    command.add_argument(
        "--ours", action="append", metavar="OPTIONS", help='also with these options: --ours="--remat none"'
    )
    command.add_argument("--peers-only", dest="ours_too", action="store_false", help="leave llamatrain out")
    command.add_argument("--new-peers", nargs="*", default=NEW_PEERS, metavar="MODE")
    command.add_argument("--adapter-peers", nargs="*", default=ADAPTER_PEERS, metavar="MODE")
    command.add_argument("--peer-device", default="cuda")
    command.add_argument("--peer-base", choices=["nf4", "bf16"], default="nf4")
    command.add_argument("--steps", type=int, default=10, help="of a run, after those to warm up")
    command.add_argument("--limit", type=float, default=600.0, help="seconds after which a run is stopped")
    command.add_argument("--json", type=Path, help="also write what was measured into this file")
    add_peer_arguments(command)


def bench_gpu(args: argparse.Namespace) -> int:
    """Time each case in turns with its peers."""
    card = measure_card(args)
    speed = f"{card['flops'] / 1e12:.0f} TFLOP/s in bf16, {card['memory'] / 1e9:.0f} GB"
    print(f"{card['name']}: {speed}; torch {card['torch']}", flush=True)
    lines = [json.dumps(card)]
    for case in args.cases or map(parse_case, CASES):
        ours, peers = run_case(case, args)
        print_case(case, ours, peers, card)
        lines += [describe_results(case, contender) for contender in (*ours, *peers)]
        if args.json:
            args.json.write_text("\n".join(lines) + "\n")
    return 0
