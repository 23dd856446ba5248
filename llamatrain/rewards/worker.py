"""Runs the function of a user's Python file: the child process that `processes.py` starts as a script.

A request is the number of answers in a line, and a line of JSON for each; the answer to it is a line of JSON for
each: a number, or an object with an error. What the user's code prints goes to standard error. This file imports
only Python's own modules, since those of the user's folder come first.
"""

import importlib.util
import inspect
import json
import os
import reprlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 300  # characters of an error
FUNCTION = "reward"
Reward = Callable[..., Any]


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return input and output of this process, and give the user's code an empty input and standard error."""
    requests, results = (os.fdopen(os.dup(number), mode) for number, mode in ((0, "rb"), (1, "wb")))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, results  # type: ignore[return-value]


def load(path: Path) -> Reward:
    """Import a file, and return its function."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise TypeError(f"it defines no function {FUNCTION}(prompt, answer, row)")
    return function


def takes_batches(function: Reward) -> bool:
    """Return True if a function takes all answers at once, as those for TRL."""
    return "completions" in inspect.signature(function).parameters


def score_batch(function: Reward, rows: list[dict[str, Any]]) -> list[Any]:
    """Return the results of a function that takes all answers, with the columns that it has parameters for."""
    columns = {
        name: [row["row"].get(name) for row in rows] for name in {key for row in rows for key in row["row"]}
    }
    columns |= {"prompts": [row["prompt"] for row in rows], "completions": [row["answer"] for row in rows]}
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        columns = {name: column for name, column in columns.items() if name in parameters}
    results = list(function(**columns))
    if len(results) != len(rows):
        raise ValueError(f"it returned {len(results)} rewards for {len(rows)} answers")
    return results


def to_number(result: Any) -> float | dict[str, str]:
    """Return what a function returned as a number, or as an error."""
    try:
        if not isinstance(result, str | bytes):
            return float(result)
    except Exception:  # of a conversion that the user's class defines
        pass
    return {"error": f"it returned {reprlib.repr(result)} instead of a number"}


def describe(error: BaseException, path: Path) -> dict[str, str]:
    """Return an error, with the line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
    try:
        text = " ".join(str(error).split())
    except Exception:  # of the user's class
        text = ""
    if isinstance(error, MemoryError):
        text = text or "it needs more memory than it may take"
    name = type(error).__name__
    place = f"line {line}: " if line else ""
    return {"error": f"{place}{name}{f': {text}' if text else ''}"[:LONGEST]}


def score(function: Reward, rows: list[dict[str, Any]], path: Path) -> list[Any]:
    """Return a number or an error for each of some rows, of which there is one unless the function takes batches."""
    try:
        if takes_batches(function):
            return [*map(to_number, score_batch(function, rows))]
        return [to_number(function(row["prompt"], row["answer"], row["row"])) for row in rows]
    except BaseException as error:
        return [describe(error, path)] * len(rows)


def main(name: str) -> None:
    """Serve requests until standard input ends."""
    path = Path(name)
    requests, results = take_streams()

    def send(result: Any) -> None:
        results.write(json.dumps(result).encode() + b"\n")
        results.flush()

    try:
        function = load(path)
        takes_batches(function)
    except BaseException as error:
        send(describe(error, path))
        return
    send("ready")
    while header := requests.readline():
        rows = [json.loads(requests.readline()) for _ in range(int(header))]
        for part in [rows] if takes_batches(function) else [[row] for row in rows]:
            for result in score(function, part, path):
                send(result)


if __name__ == "__main__":
    main(sys.argv[1])
