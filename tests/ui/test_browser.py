"""The page in a real browser: from choosing data to a merged file, its widths, the keyboard, and contrast."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import CHROMIUM, Page, browser
from tests.helpers.cli import TINY, pairs_file, ran, same_bits, text_file
from tests.helpers.ui_client import Client, served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
WIDTHS = (400, 800, 1200, 1600)
LEAST_CONTRAST = 4.5
READY = "!$('new').hidden && $('files').rows.length > 1 && $('panels').children.length > 3"
# Elements that need more room than the page has, and what there is of text that is hard to read: for each visible
# text, the contrast (WCAG 2) of its color with the first opaque background behind it.
MEASURE = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
  const ground = (element) => {
    if (!element) return rgba(getComputedStyle(document.documentElement).colorScheme === "dark" ? "black" : "white");
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(element.parentElement));
  };
  const light = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, share, n) => {
    const value = color[n] / 255; return sum + share * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  }, 0);
  const contrast = (one, other) => { const [a, b] = [light(one), light(other)].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
  const faint = [], seen = [];
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility({ visibilityProperty: true }) || element.closest(".skip, .unseen, option")) continue;
    const style = getComputedStyle(element);
    const check = (color, text) => {
      const behind = ground(element), ratio = contrast(over(rgba(color), behind), behind);
      seen.push(ratio); if (ratio < LEAST) faint.push([element.tagName, element.className, text.slice(0, 30), ratio]);
    };
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (text) check(style.color, text);
    if (element.matches("input, textarea, select")) check(style.color, element.id);
    if (element.placeholder) check(getComputedStyle(element, "::placeholder").color, element.placeholder);
  }
  const wide = [...document.querySelectorAll("main *")].filter((element) => element.checkVisibility() &&
    !element.closest("svg, .wide, legend, .choice legend") && element.getBoundingClientRect().right > innerWidth + 1);
  return { faint, seen: seen.length, needed: document.documentElement.scrollWidth, width: innerWidth,
    wide: wide.map((element) => `${element.tagName} ${element.id} ${element.className}`),
    unnamed: [...document.querySelectorAll("input, select, textarea, button")].filter((element) => element.checkVisibility() &&
      !element.labels?.length && !element.textContent.trim() && !element.getAttribute("aria-label")).map((element) => element.outerHTML),
    twice: [...document.querySelectorAll("[id]")].map((element) => element.id).filter((id, n, all) => all.indexOf(id) !== n) };
})()""".replace("LEAST", str(LEAST_CONTRAST))


IMAGE = """new Promise((tell) => {
  const image = new Image(); image.onerror = () => tell("refused"); image.onload = () => tell("sent");
  image.src = "http://127.0.0.2:1/x";
})"""
OUTLINE = """(() => {
  const style = getComputedStyle(document.activeElement);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
})()"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui")
    text_file(folder), pairs_file(folder)
    ran(
        "from-scratch",
        folder / "text.txt",
        *TINY,
        "--ctx",
        256,
        "--iters",
        4,
        "--out",
        folder / "runs" / "first",
    )
    (folder / "runs" / "first" / "model.gguf").rename(folder / "base.gguf")
    (folder / ("a_name_without_any_place_to_be_broken_at_" * 4 + ".txt")).write_text("text\n")
    return folder


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with served(root) as found:
        yield found


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(tab: Page, client: Client) -> Page:
    tab.open("about:blank")
    tab.events.clear()
    tab.show(1200)
    tab.open(client.url)
    tab.wait(READY)
    return tab


def fill(page: Page, field: str, value: str) -> None:
    page.run(
        f"$('{field}').value = '{value}'; $('{field}').dispatchEvent(new Event('input', {{ bubbles: true }}))"
    )


def click(page: Page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def choose(page: Page, folder: str, iters: int = 6) -> None:
    click(page, "[aria-label='Choose the model base.gguf']")
    click(page, "[aria-label='Add the data pairs.jsonl']")
    small = {
        "iters": iters,
        "ctx": 32,
        "batch": 2,
        "val_split": 0.2,
        "eval_every": 3,
        "sample_every": 3,
        "out": folder,
    }
    for name, value in small.items():
        fill(page, f"option-{name}", str(value))


def check_looks(page: Page, state: str) -> None:
    """It fits into every width, can be read in both schemes, and every control has a name."""
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            page.show(width, scheme=scheme)
            found = page.run(MEASURE)
            where = state, scheme, width
            assert found["seen"] > 5, where
            assert found["needed"] <= found["width"] == width and not found["wide"], (where, found["wide"])
            assert not found["faint"], (where, found["faint"])
            assert not found["unnamed"] and not found["twice"], (where, found)
    page.show(1200)


def test_from_data_to_a_merged_file(page: Page, root: Path) -> None:
    check_looks(page, "new")
    assert page.run("location.search") == "" and page.run("document.cookie") == ""
    choose(page, "runs/whole")
    click(page, "#preview")
    page.wait("document.querySelectorAll('#rows mark').length > 2")
    click(page, "#plan")
    page.wait("$('plan-result').innerText.includes('The run fits into the memory')")
    page.run("$('advanced').open = true")
    check_looks(page, "rows, plan and options")

    click(page, "#start")
    page.wait("$('state').textContent === 'finished'")
    page.wait(
        "document.querySelectorAll('#charts polyline').length > 3 && $('samples').innerText.includes('step 6')"
    )
    page.run("$('prompt').value = 'ab'; $('n').value = '4'; $('log-box').open = true")
    click(page, "#say")
    page.wait("!$('say').disabled && document.querySelectorAll('.said.model').length === 2")
    assert not page.run("[...document.querySelectorAll('#columns .error')].map((each) => each.textContent)")
    click(page, "#merge")
    page.wait("$('written').textContent.includes('merged.gguf is written')")
    check_looks(page, "finished")
    ran(
        "export-lora",
        root / "base.gguf",
        "--lora",
        root / "runs/whole/adapter.gguf",
        "--out",
        root / "same.gguf",
    )
    same_bits(root / "runs/whole/merged.gguf", root / "same.gguf")
    click(page, "#merge")
    page.wait("!$('export-error').hidden && $('export-error').textContent.includes('exists already')")

    click(page, "#to-runs")
    page.wait("$('run-list').innerText.includes('runs/whole')")
    check_looks(page, "runs")
    assert not [event for event in page.errors() if "400 (Bad Request)" not in event]


def test_it_asks_for_nothing_elsewhere(page: Page, client: Client) -> None:
    page.wait("$('files').rows.length > 1")
    asked = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert len(asked) > 4 and all(url.startswith(client.origin + "/") for url in asked)
    assert page.run("fetch('https://example.com').then(() => 'sent', () => 'refused')") == "refused"
    assert page.run(IMAGE) == "refused"


def test_an_error_stands_next_to_its_field(page: Page) -> None:
    choose(page, "runs/wrong")
    fill(page, "option-beta1", "2")
    click(page, "#start")
    page.wait("document.activeElement.id === 'option-beta1'")
    assert page.run("$('advanced').open && $('option-beta1').getAttribute('aria-invalid') === 'true'")
    assert "beta1 must be" in page.run("$('option-beta1-error').textContent")
    assert "option-beta1-error" in page.run("$('option-beta1').getAttribute('aria-describedby')")
    check_looks(page, "error")
    fill(page, "option-beta1", "")
    fill(page, "base", "missing.gguf")
    click(page, "#plan")
    page.wait("!$('base-error').hidden")
    assert page.run("$('option-beta1-error').hidden") and "missing.gguf: " in page.run(
        "$('base-error').textContent"
    )


def test_a_run_is_watched_stopped_and_found_again(page: Page, client: Client) -> None:
    choose(page, "runs/watched", iters=1_000_000)
    click(page, "#start")
    page.wait("$('state').textContent === 'running' && $('summary').innerText.includes('time left')")
    check_looks(page, "running")
    page.open("about:blank")
    page.open(client.url)  # a page that is opened again
    page.wait("$('run-title').textContent === 'runs/watched' && $('state').textContent === 'running'")
    before = page.run("$('summary').innerText")
    page.wait(f"$('summary').innerText !== {before!r}")
    click(page, "#stop")
    page.wait("$('state').textContent === 'stopped' && !$('resuming').hidden")
    step = client.run("runs/watched")["step"]
    fill(page, "more", str(step + 2))
    click(page, "#resume")
    page.wait("$('state').textContent === 'finished'")
    assert client.run("runs/watched")["step"] == step + 2


def test_a_new_model(page: Page) -> None:
    click(page, "[value='from-scratch']")
    page.wait("$('base-field').hidden && $('option-size')")
    check_looks(page, "new model")
    click(page, "[aria-label='Add the data text.txt']")
    click(page, "#preview")
    page.wait("!$('tokens_of-error').hidden && document.activeElement.id === 'tokens_of'")


def test_the_keyboard_is_enough(page: Page, client: Client) -> None:
    """From the top of the page to a run, its end and its merged file, with Tab, Enter and letters alone."""

    def tab_to(condition: str, limit: int = 400) -> None:
        for _ in range(limit):
            page.key("Tab")
            if page.run(f"((at) => {condition})(document.activeElement)"):
                outline = page.run(OUTLINE)
                assert outline, f"the focus is not visible: {condition}"
                return
        raise AssertionError(f"Tab does not reach it: {condition}")

    page.run("document.activeElement.blur()")
    tab_to("at.className === 'skip'")
    tab_to("at.ariaLabel === 'Choose the model base.gguf'")
    page.key("Enter")
    tab_to("at.ariaLabel === 'Add the data pairs.jsonl'")
    page.key("Enter")
    for name, value in {"iters": "4", "batch": "2", "ctx": "32", "out": "runs/keys"}.items():
        tab_to(f"at.id === 'option-{name}'")
        page.type(value)
    tab_to("at.id === 'plan'")
    page.key("Enter")
    page.wait("!$('plan-result').hidden")
    tab_to("at.id === 'start'")
    page.key("Enter")
    page.wait("$('state').textContent === 'finished'")
    tab_to("at.id === 'prompt'")
    page.type("ab")
    page.key("Enter")
    page.wait("document.querySelectorAll('.said.model').length === 2 && !$('say').disabled")
    tab_to("at.id === 'merge'")
    page.key("Enter")
    page.wait("$('written').textContent.includes('merged.gguf is written')")
    assert client.run("runs/keys")["state"] == "finished"
