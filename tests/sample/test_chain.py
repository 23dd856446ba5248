"""How a token is drawn: each step against its plain definition, shares over many draws, the same draws again."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.sample.chain import draw_token, penalize_repeats, select_candidates, softmax
from llamatrain.sample.options import SamplingOptions
from tests.helpers.errors import raises

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def options(**given: float) -> SamplingOptions:
    return SamplingOptions(**{"temp": 1.0, "seed": 1, **OFF, **given})  # type: ignore[arg-type]


def logits(seed: int, size: int = 50) -> np.ndarray:
    """With some that are equal."""
    return np.round(np.random.default_rng(seed).standard_normal(size) * 4, 1)


def plain(values: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Sampling as papers have it, token by token."""
    left = sorted(range(len(values)), key=lambda token: (-values[token], token))
    left = left[: top_k or len(left)]
    total, together, kept = sum(math.exp(values[token]) for token in left), 0.0, []
    for token in left:
        kept.append(token)
        together += math.exp(values[token]) / total
        if together >= top_p:
            break
    return [token for token in kept if math.exp(values[token] - values[kept[0]]) >= min_p]


@given(st.integers(0, 10_000), st.integers(0, 60), st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_candidates(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    values = logits(seed)
    for given_options in (
        {"top_k": top_k},
        {"top_p": top_p},
        {"min_p": min_p},
        {"top_k": top_k, "top_p": top_p, "min_p": min_p},
    ):
        expected = plain(values.tolist(), **{**OFF, **given_options})  # type: ignore[arg-type]
        assert select_candidates(values, options(**given_options)).tolist() == expected


@pytest.mark.parametrize("size", [63, 64, 640, 1000])
@pytest.mark.parametrize("top_k", [1, 3, 9, 10, 11, 64])
def test_candidates_of_large_vocabularies(size: int, top_k: int) -> None:
    for seed in range(20):
        values = logits(seed, size)
        assert select_candidates(values, options(top_k=top_k)).tolist() == plain(
            values.tolist(), top_k, 1.0, 0.0
        )


def test_one_candidate_is_always_left() -> None:
    values = np.array([0.0, 3.0, 3.0, 1.0])
    for given_options in ({"top_k": 1}, {"top_p": 0.0}, {"top_k": 2, "top_p": 0.1, "min_p": 1.0}):
        assert select_candidates(values, options(**given_options))[0] == 1
    assert select_candidates(values, options(min_p=1.0)).tolist() == [1, 2]


def test_the_penalty_moves_what_was_there_down() -> None:
    values = np.array([2.0, -2.0, 0.0, 3.0])
    assert penalize_repeats(values.copy(), [0, 1, 0], options(repeat_penalty=2.0)).tolist() == [
        1.0,
        -4.0,
        0.0,
        3.0,
    ]
    assert penalize_repeats(
        values.copy(), [3, 1, 0], options(repeat_penalty=2.0, repeat_last_n=2)
    ).tolist() == [
        1.0,
        -4.0,
        0.0,
        3.0,
    ]
    assert penalize_repeats(
        values.copy(), [3, 1, 0], options(repeat_penalty=2.0, repeat_last_n=-1)
    ).tolist() == [
        1.0,
        -4.0,
        0.0,
        1.5,
    ]
    for none in (options(repeat_penalty=2.0, repeat_last_n=0), options(repeat_penalty=1.0)):
        assert penalize_repeats(values.copy(), [3, 1, 0], none).tolist() == values.tolist()
    assert draw_token(values, options(temp=0, repeat_penalty=2.0), 0, [3]) == 0


def test_without_temperature_the_first_of_the_likeliest_is_taken() -> None:
    values = np.array([0.0, 5.0, 1.0, 5.0], np.float32)
    assert {draw_token(values, options(temp=0, seed=seed), seed, []) for seed in range(20)} == {1}
    assert values.tolist() == [0.0, 5.0, 1.0, 5.0]  # the model's own memory


@pytest.mark.parametrize("temp", [0.5, 1.0, 2.0])
def test_shares_of_many_draws(temp: float) -> None:
    values, count = np.array([1.0, 0.0, 2.0, -1.0, 1.5]), 20_000
    chosen = options(temp=temp, top_k=4, seed=7)
    drawn = (
        np.bincount([draw_token(values, chosen, number, []) for number in range(count)], minlength=5) / count
    )
    expected = np.zeros(5)
    expected[[2, 4, 0, 1]] = softmax(values[[2, 4, 0, 1]] / temp)
    np.testing.assert_allclose(drawn, expected, atol=4 * 0.5 / math.sqrt(count))
    assert drawn[3] == 0


def test_the_shares_that_top_p_and_min_p_see_are_those_before_the_temperature() -> None:
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    for cut, kept in (({"top_p": 0.79}, {0, 1}), ({"min_p": 0.29}, {0, 1, 2})):
        drawn = {draw_token(values, options(temp=100.0, **cut), number, []) for number in range(300)}
        assert drawn == kept


def test_a_draw_follows_from_seed_and_number() -> None:
    values = np.zeros(1000)
    first = [draw_token(values, options(seed=3), number, []) for number in range(50)]
    again = [draw_token(values, options(seed=3), number, [1, 2]) for number in reversed(range(50))]
    assert again[::-1] == first and len(set(first)) > 40
    assert [draw_token(values, options(seed=4), number, []) for number in range(50)] != first


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    values = np.zeros(5, np.float32)
    values[2] = value
    with pytest.raises(LlamatrainError, match="finite"):
        draw_token(values, options(temp=0), 0, [])


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("n", -2, "-n -2"),
        ("temp", -0.1, "--temp -0.1"),
        ("temp", math.nan, "--temp nan"),
        ("temp", math.inf, "--temp inf"),
        ("top_k", -1, "--top-k -1"),
        ("top_p", 1.1, "--top-p 1.1"),
        ("min_p", -0.1, "--min-p -0.1"),
        ("repeat_penalty", 0.0, "--repeat-penalty 0"),
        ("repeat_last_n", -2, "--repeat-last-n -2"),
        ("seed", 1 << 64, "--seed 18446744073709551616"),
        ("stop", ("a", ""), "--stop"),
    ],
)
def test_options_that_cannot_be(name: str, value: float, flag: str) -> None:
    with raises("invalid-option", UsageError, match=f"^{flag.split()[0]} "):
        SamplingOptions(**{name: value})  # type: ignore[arg-type]


def test_options_at_their_bounds() -> None:
    bounds = {"n": 10**400, "temp": 0, "top_k": 10**400, "top_p": 0, "min_p": 1, "seed": (1 << 64) - 1}
    options = SamplingOptions(**bounds, repeat_last_n=10**400)
    assert vars(options).items() >= bounds.items()
