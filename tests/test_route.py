"""The way of a run's options through the house: from the command to the loop they meet few rooms, and never go up.

Those of data, adapters and samples go on to the folders that they are for, and are not followed there.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from llamatrain.config.options import Checked
from llamatrain.model.options import ModelOptions
from llamatrain.recipe.asked import PARTS, Asked
from llamatrain.recipe.options import PlaceOptions, RunOptions, TrainOptions
from llamatrain.recipe.request import Request
from llamatrain.recipe.resolved import Resolved
from llamatrain.recipe.tuning import TuneOptions
from tests.runs import TINY, Argument, ran, text_file
from tests.small_models import small, weights, written
from tests.test_ranks import RANKS, place

ROOMS = 10
CARRIED = (ModelOptions, TuneOptions, TrainOptions, RunOptions, PlaceOptions, Asked, Request, Resolved)
DECLARING = {kind.__module__ for kind in (Checked, PlaceOptions, Asked, *PARTS.values())}


def carries(frame: FrameType) -> bool:
    """Whether a function is handed options, on their own or as a stage of them."""
    return any(isinstance(value, CARRIED) for value in frame.f_locals.values())


def room_of(frame: FrameType) -> str | None:
    name: str = frame.f_globals.get("__name__", "")
    return name if name.startswith("llamatrain.") and name not in DECLARING and carries(frame) else None


@contextmanager
def watched() -> Iterator[list[tuple[str | None, str]]]:
    """Each call that hands options on: the room that it comes from, if that has some, and the one that it goes to."""
    seen: list[tuple[str | None, str]] = []

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (room := room_of(frame)):
            before = frame.f_back
            while before and not before.f_globals.get("__name__", "").startswith("llamatrain."):
                before = before.f_back
            seen.append((room_of(before) if before else None, room))

    previous = sys.getprofile()
    sys.setprofile(called)
    try:
        yield seen
    finally:
        sys.setprofile(previous)


def route(*arguments: Argument) -> list[tuple[str | None, str]]:
    with watched() as seen:
        ran(*arguments)
    return seen


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str | None, str]]]:
    folder: Path = tmp_path_factory.mktemp("route")
    text, base = text_file(folder), written(folder / "base.gguf", small(), weights(small()))
    new = ("from-scratch", text, *TINY, "--iters", 2, "--ctx", 16, "--val-split", 0.2, "--sample-every", 1)
    return {
        "new": route(*new, "--sample-prompt", "a", "--out", folder / "new"),
        "resumed": route("from-scratch", "--resume", folder / "new", "--iters", 3),
        "tuned": route("finetune", base, text, "--iters", 2, "--ctx", 16, "--out", folder / "tuned"),
    }


@pytest.mark.parametrize("run", ["new", "resumed", "tuned"])
def test_options_meet_few_rooms(routes: dict[str, list[tuple[str | None, str]]], run: str) -> None:
    rooms = dict.fromkeys(room for _, room in routes[run])
    assert 3 < len(rooms) <= ROOMS, list(rooms)


@pytest.mark.parametrize("run", ["new", "resumed", "tuned"])
def test_options_never_go_up(routes: dict[str, list[tuple[str | None, str]]], run: str) -> None:
    steps = {(before, room) for before, room in routes[run] if before}
    assert not [(before, room) for before, room in steps if RANKS[place(room)] > RANKS[place(before)]]


def test_the_loop_is_handed_none(routes: dict[str, list[tuple[str | None, str]]]) -> None:
    assert not [room for run in routes.values() for _, room in run if place(room) in ("train", "store", "engine")]
