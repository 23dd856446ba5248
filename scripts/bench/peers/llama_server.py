"""Times llama.cpp's server on texts that are generated in parallel.

    python scripts/bench/peers/llama_server.py MODEL.gguf PROMPT NEW THREADS ROUNDS SLOTS...

`bench.py decode` starts it. PROMPT and NEW are the tokens of a prompt and of an answer. Prints the tokens per second
for each number of slots.
"""

import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from urllib.request import Request, urlopen

import xllamacpp


def start_server(model: str, ctx: int, slots: int, threads: int) -> xllamacpp.Server:
    """Start a server with a number of slots."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = ctx * slots, slots, True, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def complete(address: str, prompt: list[int], new: int) -> None:
    """Generate an answer."""
    content = {
        "prompt": prompt,
        "n_predict": new,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    body = json.dumps(content).encode()
    request = Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        found = json.load(answer)["tokens_predicted"]
    assert found == new, found


def main() -> None:
    """Time each number of slots."""
    model, *words = sys.argv[1:]
    prompt, new, threads, rounds, *all_slots = map(int, words)
    for slots in all_slots:
        server = start_server(model, prompt + new + 8, slots, threads)
        address, numbers = server.listening_address, random.Random(0)
        prompts = [[numbers.randrange(256) for _ in range(prompt)] for _ in range(slots)]
        seconds = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            with ThreadPoolExecutor(slots) as pool:
                list(pool.map(complete, repeat(address), prompts, repeat(new)))
            seconds.append(time.perf_counter() - start)
        speed = slots * new / statistics.median(seconds[1:])
        print(f"{f'{slots}, llama-server':16} {speed:9.1f}", flush=True)
        del server


if __name__ == "__main__":
    main()
