"""The memory map: what lies in the arena, when and where, in a picture of a bounded size."""

import json
import random
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from llamatrain.engine.lifetimes import KINDS, Lifetime, find_peak, list_lifetimes
from llamatrain.engine.plan import plan
from llamatrain.report import memory_layout as arenas
from llamatrain.report.memory_layout import MemoryLayout, paint_grid
from llamatrain.report.memory_map import HIGH, WIDE, draw_svg, draw_tensors, memory_section
from tests.helpers.cli import TINY, ran, run, text_file
from tests.helpers.random_graphs import RandomGraph, random_graphs

SVG = "{http://www.w3.org/2000/svg}"
TASK = (*TINY, "--ctx", 32, "--batch", 2)


def rectangles(text: str) -> list[dict[str, str]]:
    return [
        each.attrib | {"title": each.findtext(f"{SVG}title") or ""}
        for each in ET.fromstring(text).iter(f"{SVG}rect")
    ]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    place = tmp_path_factory.mktemp("map")
    file = place / "map.svg"
    done = ran("plan", "from-scratch", text_file(place), *TASK, "--remat", "light", "--svg", file)
    assert f"{file}: the memory map\n" in done.err and "total" in done.out
    return place, file.read_text()


def test_the_picture_has_each_kind_and_the_peak(drawn: tuple[Path, str]) -> None:
    text = drawn[1]
    named = [each for each in rectangles(text) if each["title"]]
    assert {"m-forward", "m-kept", "m-backward", "m-gradient", "m-again"} <= {
        each["class"].split()[0] for each in named
    }
    assert any(re.search(r"^blk\.0|of blk\.0", each["title"]) for each in named)
    (peak,) = [each for each in ET.fromstring(text).iter(f"{SVG}line") if each.attrib["class"] == "m-peak"]
    there = sum(float(each["height"]) for each in named if covers(each, float(peak.attrib["x1"])))
    assert there > 0.8 * HIGH  # no other moment takes more
    for x in np.linspace(1, WIDE - 1, 50):
        assert sum(float(each["height"]) for each in named if covers(each, x)) <= there + 1
    assert "prefers-color-scheme: dark" in text and "it is fullest at call" in text


def covers(each: dict[str, str], x: float) -> bool:
    return float(each["x"]) <= x < float(each["x"]) + float(each["width"])


def test_nothing_lies_over_anything(drawn: tuple[Path, str]) -> None:
    boxes = [
        [float(each[side]) for side in ("x", "y", "width", "height")]
        for each in rectangles(drawn[1])
        if each["title"]
    ]
    for n, (x, y, wide, high) in enumerate(boxes):
        assert x >= -0.01 and y >= -0.01 and x + wide <= WIDE + 0.02 and y + high <= HIGH + 0.02
        for left, top, w, h in boxes[:n]:
            across, down = min(x + wide, left + w) - max(x, left), min(y + high, top + h) - max(y, top)
            assert across < 0.05 or down < 0.05


def test_it_replaces_its_like_and_nothing_else(drawn: tuple[Path, str]) -> None:
    place, text = drawn
    data = place / "text.txt"
    before = data.read_bytes()
    done = run("plan", "from-scratch", data, *TASK, "--svg", data)
    assert done.code == 1 and "[file-exists]" in done.err and data.read_bytes() == before
    for words, code, told in (
        (("--svg", place), 1, "this is a folder"),
        (("--svg", place / "no" / "map.svg"), 2, "[no-such-folder]"),
    ):
        done = run("plan", "from-scratch", data, *TASK, *words)
        assert done.code == code and told in done.err and done.err.count("\n") == 1
    assert run("plan", "from-scratch", data, *TASK, "--svg", place / "x.svg", "--ranks", 2).code == 2
    ran("plan", "from-scratch", data, *TASK, "--remat", "light", "--svg", place / "map.svg")
    assert (place / "map.svg").read_text() == text  # the same plan, the same picture


def test_the_page_has_the_same_picture(drawn: tuple[Path, str], tmp_path: Path) -> None:
    ran(
        "from-scratch",
        drawn[0] / "text.txt",
        *TASK,
        "--remat",
        "light",
        "--iters",
        1,
        "--out",
        tmp_path / "run",
    )
    arena = MemoryLayout.from_json(json.loads((tmp_path / "run" / "report.json").read_text())["memory"])
    assert arena
    text = (tmp_path / "run" / "report.html").read_text()
    for part in draw_tensors(arena):
        assert part in text and part in drawn[1]


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(random_graphs())
def test_of_any_graph_no_two_lives_meet(g: RandomGraph) -> None:
    made = plan(g.outputs, scratch=lambda node: 100 * (len(node.sources) > 1))
    lives, peak = list(list_lifetimes(made)), find_peak(made)
    assert len(lives) == len(made.offsets) + len(made.scratch)
    for one, other in combinations(lives, 2):
        apart = one.last < other.first or other.last < one.first
        assert apart or one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
    assert all(
        0 <= each.first <= each.last < len(made.nodes) and each.offset + each.size <= made.arena
        for each in lives
    )
    assert (peak is None) == (not lives)


# ---- its size --------------------------------------------------------------


def many(count: int, seed: int) -> list[Lifetime]:
    """Anywhere, of any size: nothing that a plan would do is worse."""
    chance, lives = random.Random(seed), list[Lifetime]()
    for n in range(count):
        first, offset = chance.randrange(100_000), chance.randrange(1 << 30)
        length, size = int(chance.expovariate(0.01)), 1 + int(chance.expovariate(1e-5))
        lives.append(
            Lifetime(chance.choice(KINDS), f"value {n}", first, min(first + length, 99_999), offset, size)
        )
    return lives


def test_whatever_a_model_is_the_picture_is_small() -> None:
    lives = sorted(many(50_000, 1), key=lambda life: -life.size)
    size = max(life.offset + life.size for life in lives)
    grid, specks = paint_grid(lives[arenas.MAX_NAMED :], 100_000, size)
    assert 0 < len(specks) <= arenas.MAX_CELLS
    arena = MemoryLayout(
        calls=100_000,
        size=size,
        peak=5,
        peak_name="<b>",
        at_peak={"kept": 1},
        alive=(("<i>", 5), ("linear_cross_entropy_back of output.weight", 4)),
        named=tuple(lives[: arenas.MAX_NAMED]),
        grid=grid,
        specks=specks,
    )
    text = draw_svg(arena, "<script>")
    assert (
        len(text) < 400_000
        and "<script>" not in text
        and "<b>" not in memory_section(arena)
        and "<i>" not in memory_section(arena)
    )
    assert ": linear_cross_entropy_ ... utput.weight</text>" in text, (
        "a name is cut in its middle, and says so"
    )
    ET.fromstring(text)
    assert MemoryLayout.from_json(json.loads(json.dumps(arena.to_json()))) == arena


def test_what_is_small_is_painted_where_it_lies() -> None:
    life = Lifetime("kept", "", 250, 499, 100, 50)  # of 1,000 calls and 200 bytes
    (columns, rows), specks = paint_grid([life], 1000, 200)
    assert [
        (speck.x / columns, speck.y / rows, speck.width / columns, speck.height / rows) for speck in specks
    ] == [(0.25, 0.5, 0.25, 0.25)]


@pytest.mark.parametrize(
    "damage",
    [
        {"calls": 0},
        {"calls": True},
        {"size": -1},
        {"peak": 10**30},
        {"named": [[99, "x", 0, 0, 0, 1]]},
        {"named": [[0, 5, 0, 0, 0, 1]]},
        {"named": [[0, "x", 1, 0, 0, 1]]},
        {"named": [[0, "x", 0, 0.5, 0, 1]]},
        {"named": "x"},
        {"grid": [0, 1]},
        {"grid": []},
        {"specks": [[9, 0, 0, 1, 1]]},
        {"specks": [[0, "<", 0, 1, 1]]},
        {"alive": [["x"]]},
        {"at_peak": {"kept": "<b>"}},
        {"peak_name": None},
    ],
)
def test_what_anybody_may_have_written_is_no_map(damage: dict) -> None:
    sound = {
        "calls": 2,
        "size": 8,
        "peak": 1,
        "peak_name": "x",
        "at_peak": {"kept": 8},
        "alive": [["x", 8]],
        "grid": [4, 4],
    }
    sound |= {"specks": [[0, 0, 0, 1, 1]], "named": [[0, "x", 0, 1, 0, 8]]}
    assert MemoryLayout.from_json(sound)
    assert MemoryLayout.from_json({**sound, **damage}) is None
    assert MemoryLayout.from_json([]) is None and MemoryLayout.from_json(None) is None
