"""The page in a real browser, where Debian's chromium is there: it fits, and asks for nothing."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import TINY, ran, text_file

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-extensions",
    ),
    *("--disable-domain-reliability", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
SCHEMES = {"dark": 0, "light": 1}
WIDTHS = (400, 800, 1600)
MEASURE = """
<script>
const box = (each) => each.getBoundingClientRect(), all = (which) => [...document.querySelectorAll(which)];
const out = (each, within) => box(each).left < box(within).left - 1 || box(each).right > box(within).right + 1;
const clipped = all(".ys span, .xs span").filter((each) => out(each, each.closest("figure")));
const outside = all("main *").filter((each) => !each.closest(".wide, svg") && box(each).right > innerWidth + 1);
parent.told(frameElement.id, {
  width: innerWidth, needed: document.documentElement.scrollWidth, clipped: clipped.map((each) => each.textContent),
  outside: outside.map((each) => each.tagName), ground: getComputedStyle(document.body).backgroundColor,
  plots: all(".plot svg").map((each) => [box(each).width, box(each).height]),
  small: all("main *").filter((each) => parseFloat(getComputedStyle(each).fontSize) < 12).length,
});
</script></body>"""
GATHER = """<script>
const found = {};
function told(name, facts) { found[name] = facts; document.getElementById("measured").textContent = JSON.stringify(found); }
</script><pre id="measured"></pre>"""


def browsed(file: Path, scheme: str, *more: str) -> str:
    """The document, as it is in the end."""
    assert CHROMIUM
    profile = f"--user-data-dir={file.parent / 'profile'}"
    settings = (
        profile,
        "--window-size=1600,1000",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
    )
    command = [CHROMIUM, *QUIET, *settings, *more, "--dump-dom", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("browser")
    text, folder = text_file(place), place / ("a_name_without_any_place_to_be_broken_at_" * 4)
    often = (
        "--ctx",
        32,
        "--batch",
        2,
        "--eval-every",
        3,
        "--save-every",
        9,
        "--sample-every",
        3,
        "--val-split",
        0.1,
    )
    prompt = ("--sample-prompt", "words" * 5)
    ran("from-scratch", text, *TINY, *often, *prompt, "--iters", 12, "--profile", "--out", folder)
    ran("from-scratch", text, *TINY, *often, "--iters", 9, "--lr", 0.01, "--out", place / "other")
    ran("report", folder, place / "other", "--out", place / "both.html")
    return {"one": (folder / "report.html").read_text(), "several": (place / "both.html").read_text()}


def framed(name: str, page: str, width: int) -> str:
    return f'<iframe id="{name}" style="width:{width}px;height:1000px;border:0" srcdoc="{escape(page)}"></iframe>'


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_fits(pages: dict[str, str], tmp_path: Path, scheme: str) -> None:
    """In frames, as no window is so narrow; its policy has to go for once, which forbids to measure."""
    measured = {
        name: re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", MEASURE)
        for name, page in pages.items()
    }
    frames = "".join(
        framed(f"{name} {width}", page, width) for name, page in measured.items() for width in WIDTHS
    )
    (tmp_path / "page.html").write_text(
        f'<!doctype html><html style="color-scheme: {scheme}"><body>{GATHER}{frames}'
    )
    found = re.search(r"<pre id=\"measured\">(.*?)</pre>", browsed(tmp_path / "page.html", scheme), re.DOTALL)
    assert found
    all_ = json.loads(found[1])
    assert len(all_) == len(pages) * len(WIDTHS)
    for name, told in all_.items():
        assert told["width"] == int(name.split()[1]) >= told["needed"], (name, told)
        assert not told["clipped"] and not told["outside"] and not told["small"], (name, told)
        assert len(told["plots"]) >= 5 and all(w > 250 and h > 150 for w, h in told["plots"])
        brightness = sum(map(int, re.findall(r"\d+", told["ground"])))
        assert brightness > 600 if scheme == "light" else brightness < 150


def asked(log: Path) -> Iterator[str]:
    """What a page asked for of a network."""
    found: dict[str, Any] = json.loads(log.read_text())
    for event in found["events"]:
        url = event.get("params", {}).get("url", "")
        if isinstance(url, str) and url.startswith(("http", "ws", "ftp")):
            yield url


def test_it_asks_nothing_of_a_network(pages: dict[str, str], tmp_path: Path) -> None:
    log, file = tmp_path / "net.json", tmp_path / "page.html"

    def asked_by(body: str) -> set[str]:
        file.write_text(f"<!doctype html><body>{body}")
        browsed(file, "light", f"--log-net-log={log}")
        return {
            url for url in asked(log) if "google" not in url and "gvt1" not in url
        }  # the browser's own affairs

    # what would ask is seen, and what a page says of itself forbids it
    image = '<img src="http://somewhere.invalid/a.png">'
    hostile = pages["one"].replace("</body>", f"{image}</body>")
    assert not asked_by(
        "".join(framed(f"page {n}", page, 800) for n, page in enumerate([*pages.values(), hostile]))
    )
    assert asked_by(image) == {"http://somewhere.invalid/a.png"}
