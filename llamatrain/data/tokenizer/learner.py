"""The child that learns a vocabulary: a script of its own, started by learning.py, that imports nothing of the package.

`tokenizers` keeps up to 150 MB of what it worked with for as long as its process lives; here that ends with the learning.
In come one line of JSON with the options, texts with their lengths before them, and a length of -1; out comes one of JSON.
"""

import json
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

LENGTH = struct.Struct("<q")
END = LENGTH.pack(-1)


def merges(texts: Iterable[str], size: int, pattern: str, alphabet: list[str]) -> list[list[str]]:
    """The pairs that are merged, the most frequent first, until there are so many tokens or no pair comes twice."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    found: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return found


def received(stream: BinaryIO) -> Iterator[str]:
    """The texts up to the end that is said; without one the parent is gone."""
    while (length := LENGTH.unpack(whole(stream, LENGTH.size))[0]) >= 0:
        yield whole(stream, length).decode()
    threading.Thread(target=end_with_parent, args=[stream], daemon=True).start()


def whole(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        os._exit(1)
    return data


def end_with_parent(stream: BinaryIO) -> None:
    """The parent says nothing more; its end of the pipe closes when it is gone."""
    stream.read(1)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    source = sys.stdin.buffer
    options: dict[str, Any] = json.loads(source.readline())
    try:
        answer: dict[str, Any] = {"merges": merges(received(source), **options)}
    except MemoryError:
        answer = {"error": "it takes too much memory"}
    except BaseException as error:  # whatever goes wrong there is told by the parent
        answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    try:
        sys.stdout.write(json.dumps(answer))
        sys.stdout.flush()
    finally:
        os._exit(0)  # the thread that waits for the parent holds the stream


if __name__ == "__main__":
    main()
