"""Generated tokens as text: whole characters, and nothing of a stop text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatrain.sample.text import StopText, TokenNumbers, stream_text


class Letters:
    """Tokens are letters; at the end comes what the last one left."""

    def __init__(self, last: str = "") -> None:
        self.last = last

    def feed(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return self.last


def passed(text: str, *stop: str, last: str = "") -> list[str]:
    return list(stream_text(map(ord, text), Letters(last), stop))


def before(text: str, stops: tuple[str, ...]) -> str:
    """The plain definition: letter by letter, until what was read ends with a stop text."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


def test_text_streams() -> None:
    assert passed("abc") == ["a", "b", "c"]
    assert passed("abc", last="d") == ["a", "b", "c", "d"]


def test_nothing_of_a_stop_text_is_passed() -> None:
    assert passed("abENDcd", "END") == ["a", "b"]
    assert passed("abENEND", "END") == ["a", "b", "EN"]
    assert passed("aabaac", "aac") == ["aab"]
    assert passed("abEN", "END") == ["a", "b", "EN"]
    assert passed("abEN", "END", last="D") == ["a", "b"]


def test_no_token_is_taken_after_a_stop_text() -> None:
    tokens = iter(map(ord, "abcdef"))
    assert list(stream_text(tokens, Letters(), ["c"])) == ["a", "b"]
    assert next(tokens) == ord("d")


TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


@given(TEXT, STOPS)
def test_what_passes_is_what_is_before(text: str, stops: tuple[str, ...]) -> None:
    assert "".join(passed(text, *stops)) == before(text, stops)


@given(st.lists(TEXT, max_size=5), STOPS)
def test_pieces_make_no_difference(pieces: list[str], stops: tuple[str, ...]) -> None:
    guard, given_out = StopText(stops), ""
    for piece in pieces:
        given_out += guard.feed(piece)
        assert before("".join(pieces), stops).startswith(given_out)
        if guard.is_complete:
            break
    assert given_out + ("" if guard.is_complete else guard.flush()) == before("".join(pieces), stops)


@pytest.mark.parametrize("tokens", [[], [3], [3, 0, 12]])
def test_numbers(tokens: list[int]) -> None:
    assert "".join(stream_text(tokens, TokenNumbers())) == " ".join(map(str, tokens))
