"""Thoughts of an answer are told from its words while it streams, as llama-server tells them."""

import pytest

from llamatrain.sample.thoughts import find_marks, split_thoughts

THINK = ("<think>", "</think>")


def split(answer: str, prompt: str, size: int) -> tuple[str, str]:
    pieces = list(
        split_thoughts((answer[at : at + size] for at in range(0, len(answer), size)), prompt, THINK)
    )
    return tuple("".join(text for text, thought in pieces if thought is wanted) for wanted in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("prompt", "answer", "thoughts", "words"),
    [
        ("<think>\n", "\n</think>\n\nhello", "", "hello"),
        ("<think>\n", "I add.\n\nSo.\n</think>\n\n4 < 5", "I add.\n\nSo.", "4 < 5"),
        ("<think>", "no end", "no end", ""),
        ("assistant\n", "<think>\nI add.\n</think>\n\n4", "I add.", "4"),
        ("assistant\n", "<think>\n\n</think>\n\n4", "", "4"),
        ("assistant\n", "4 </think> 5", "", "4 </think> 5"),
        ("assistant\n", " <thin", "", " <thin"),
        ("assistant\n", "  x ", "", "  x "),
        ("<think>\n", "a </thi b</think>c", "a </thi b", "c"),
        ("<think>\n\n</think>\n\n", "4", "", "4"),
        ("<think>\n\n</think>\n\n", "<think>a</think>4", "", "<think>a</think>4"),
    ],
)
def test_thoughts_and_words(prompt: str, answer: str, thoughts: str, words: str, size: int) -> None:
    assert split(answer, prompt, size) == (thoughts, words)


def test_marks_are_those_of_the_template() -> None:
    assert (
        find_marks("x</think>y") == THINK
        and find_marks("[THINK]") == ("[THINK]", "[/THINK]")
        and find_marks("none") is None
    )
