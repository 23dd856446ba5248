"""Extracts answers from texts by a regular expression, in a child process.

A pattern can take exponential time, and nothing within a process interrupts it. The child reads a JSON object, the
pattern and the texts, and writes the list of results.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llamatrain
from llamatrain.config.messages import quote
from llamatrain.distributed.launcher import env_without_launcher
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.platform.child_limits import limit_memory, set_timer

SECONDS = 10.0  # for all texts together, with the start of the process
MAX_MEMORY = 1 << 30  # bytes


def extract_answers(pattern: str, texts: Sequence[str]) -> list[str | None]:
    """Return the first match in each text, or its first group that is not empty; None without a match.

    Raise UsageError if the pattern is invalid or takes too long.
    """
    flag = f"--answer-pattern {quote(pattern)}"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "llamatrain.commands.answer_pattern"],
            input=json.dumps([pattern, texts]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**env_without_launcher(), "PYTHONPATH": os.pathsep.join(import_path())},
            timeout=SECONDS,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        raise UsageError(
            f"{flag} takes more than {SECONDS:g} s or too much memory for {len(texts):,} answers; simplify it, for "
            "example where one repetition stands within another",
            code="slow-pattern",
        ) from None
    except OSError as error:
        raise LlamatrainError(f"no process can be started: {error.strerror}", code="system-error") from error
    if "error" in answer:
        raise UsageError(
            f"{flag} is not a regular expression of Python: {answer['error']}", code="invalid-pattern"
        )
    matches: list[str | None] = answer["matches"]
    return matches


def import_path() -> list[str]:
    """Return the folders in which the child finds this package."""
    package = str(Path(llamatrain.__file__).resolve().parent.parent)
    return [package, *filter(None, [os.environ.get("PYTHONPATH")])]


# ---- the child process -----------------------------------------------------


def match_text(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the first match, or its first group that is not empty."""
    match = pattern.search(text)
    if match is None:
        return None
    return next(filter(None, match.groups()), "") if match.groups() else match[0]


def main() -> None:
    """Read a pattern and texts from standard input, and print their matches."""
    limit_memory(MAX_MEMORY)
    set_timer(SECONDS)
    source, texts = json.loads(sys.stdin.buffer.read())
    try:
        pattern = re.compile(source)
        answer: dict[str, Any] = {"matches": [match_text(pattern, text) for text in texts]}
    except (re.error, OverflowError, RecursionError) as error:
        answer = {"error": " ".join(str(error).split())[:200]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
