"""Finds the graphics cards that PyTorch can use, in a process of its own: a broken driver may hang or end it."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import llamatrain
from llamatrain.commands.doctor.problems import Findings, Problem, format_size, make_fact
from llamatrain.distributed.launcher import env_without_launcher

TIMEOUT = 60.0  # seconds that PyTorch may take to be loaded and to find cards
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NONE = "none: all work is done by the processor"
COMMAND = (sys.executable, "-m", "llamatrain.commands.doctor.cards")


class Card(NamedTuple):
    """A graphics card."""

    device: str  # the value of --device
    name: str
    nbytes: int  # memory, or how much of it programs should use


class NoAnswer(Exception):
    """The process did not list the cards."""


def describe_cards() -> Findings:
    """Yield the graphics cards, and which of them is used."""
    if find_spec("torch") is None:
        remedy = "; pip install 'llamatrain[torch]' installs PyTorch, which can use the NVIDIA card"
        yield make_fact("cards", None, "unknown without PyTorch")
        yield make_fact("used", None, NONE + (remedy if NVIDIA_DRIVER.exists() else ""))
        return
    try:
        cards = find_cards()
    except NoAnswer as error:
        yield make_fact("cards", None, "unknown")
        yield make_fact("used", None, NONE)
        yield Problem(
            f"the installed PyTorch does not work ({error})", "reinstall it, or check the card's driver"
        )
        return
    words = ", ".join(f"{card.name} with {format_size(card.nbytes)} ({card.device})" for card in cards)
    yield make_fact("cards", [card._asdict() for card in cards], words)
    if cards:
        yield make_fact("used", cards[0].device, f"the first, with --device {cards[0].device} or auto")
    else:
        remedy = "; PyTorch does not find the NVIDIA card: install a build of it for CUDA and this driver"
        yield make_fact("used", None, NONE + (remedy if NVIDIA_DRIVER.exists() else ""))


def find_cards() -> list[Card]:
    """Return the cards that PyTorch finds in another process."""
    package = str(Path(llamatrain.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            COMMAND,
            env={**env_without_launcher(), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )
        out, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a driver does not end
            process.communicate(timeout=1)
        raise NoAnswer(f"it has not answered for {TIMEOUT:.0f} seconds") from None
    except OSError as error:
        raise NoAnswer(error.strerror) from None
    try:
        return [Card(*values) for values in json.loads(out.splitlines()[-1])]
    except (ValueError, TypeError, IndexError):
        lines = errors.decode(errors="replace").split("\n")
        last = next(filter(None, map(str.strip, reversed(lines))), f"exit code {process.returncode}")
        raise NoAnswer(last[:200]) from None


# ---- the child process -----------------------------------------------------


def list_cards() -> list[Card]:
    """Return the cards that PyTorch finds, by device."""
    import torch

    from llamatrain.kernels.torch.device import available_gpus

    cards = list[Card]()
    for device in available_gpus():
        if device == "mps":
            cards.append(Card(device, "Apple", torch.mps.recommended_max_memory()))
            continue
        library = getattr(torch, device)
        for number in range(library.device_count()):
            facts = library.get_device_properties(number)
            cards.append(Card(device, facts.name, facts.total_memory))
    return cards


if __name__ == "__main__":
    print(json.dumps(list_cards()), flush=True)
    os._exit(0)  # PyTorch's threads may abort a normal exit
