"""Times how many tokens are generated a second for texts together, and one after the other: `bench.py decode`.

With a peer, llama.cpp's server generates the same number of texts in parallel, with as many threads.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.processes import ROOT, make_random_model
from bench.shapes import SHAPES
from bench.timer import print_header
from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.sample.batch import BatchDecoder, Request, complete
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions

PEER = ROOT / "scripts/bench/peers/llama_server.py"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `decode`."""
    command.add_argument("type", nargs="?", default="q8_0")
    command.add_argument("--shape", choices=SHAPES, default="small")
    command.add_argument("--layer", type=int, help="only so many blocks")
    command.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8, 16])
    command.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    command.add_argument("--new", type=int, default=64, help="tokens of an answer")
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--peer", default="", help="a Python that has xllamacpp")


class Timed:
    """A model that generates texts, and how long that takes."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.args, self.ctx = args, args.prompt + args.new
        self.model = TextModel(path, LoadOptions(ctx=self.ctx, threads=args.threads), AdapterOptions())
        random = np.random.default_rng(0)
        self.prompts = [
            [int(token) for token in random.integers(0, 256, args.prompt)] for _ in range(max(args.slots))
        ]

    def requests(self, count: int) -> list[Request]:
        """Return requests of different prompts."""
        options = SamplingOptions(n=self.args.new, temp=0)
        return [Request(prompt, options) for prompt in self.prompts[:count]]

    def time_single(self, decoder: Decoder, count: int) -> float:
        """Return the seconds of texts one after the other."""
        start = time.perf_counter()
        for request in self.requests(count):
            assert len(list(Generation(decoder, request.tokens, request.options))) == self.args.new
        return time.perf_counter() - start

    def time_batch(self, decoder: BatchDecoder) -> float:
        """Return the seconds of a text in each slot."""
        start = time.perf_counter()
        done = list(complete(decoder, self.requests(decoder.slots)))
        assert all(len(each.tokens) == self.args.new for each in done)
        return time.perf_counter() - start


def bench_decoding(args: argparse.Namespace) -> int:
    """Time the decoders in turns, and then the peer."""
    print_header(args, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        layers = ["--layer", args.layer] if args.layer else []
        length = ["--ctx", args.prompt + args.new + 8]  # a server stops before the context is full
        make_random_model(path, "--shape", args.shape, "--type", args.type, *length, *layers)
        timed = Timed(path, args)
        how = {"ctx": timed.ctx, "threads": args.threads, "weights": timed.model.weights}
        single = Decoder(timed.model.h, timed.model.memory, **how)
        batches = [
            BatchDecoder(timed.model.h, timed.model.memory, slots=slots, **how) for slots in args.slots
        ]
        for decoder in batches:
            timed.time_batch(decoder)
        timed.time_single(single, 1)
        seconds: list[list[float]] = [[] for _ in args.slots]
        alone: list[float] = []
        for _ in range(args.rounds):
            alone.append(timed.time_single(single, 2) / 2)
            for decoder, times in zip(batches, seconds, strict=True):
                times.append(timed.time_batch(decoder))
        one = args.new / float(np.median(alone))
        print(
            f"\n{args.shape} {args.type}, prompts of {args.prompt} tokens, answers of {args.new}\n\n"
            f"{'texts together':16} {'tokens/s':>9} {'x':>6}"
        )
        print(f"{'one at a time':16} {one:9.1f} {1:6.2f}")
        for slots, times in zip(args.slots, seconds, strict=True):
            speed = slots * args.new / float(np.median(times))
            print(f"{slots:<16} {speed:9.1f} {speed / one:6.2f}", flush=True)
        if args.peer:
            numbers = (args.prompt, args.new, args.threads, args.rounds, *args.slots)
            subprocess.run([args.peer, PEER, path, *map(str, numbers)], check=True, stderr=sys.stderr)
    return 0
