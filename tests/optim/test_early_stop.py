"""Stop rules: each fires when it should, says why, and goes on from what it kept."""

from dataclasses import asdict

from llamatrain.optim.early_stop import StopRules, StopState


def stops_at(rules: StopRules, losses: list[float]) -> tuple[int, str] | None:
    """Which evaluation, counted from 1, is the last, and why."""
    state = StopState()
    for count, loss in enumerate(losses, 1):
        if reason := state.observe(rules, loss):
            return count, reason
    return None


def test_without_rules_nothing_stops() -> None:
    assert stops_at(StopRules(), [1.0] * 50) is None


def test_no_improvement() -> None:
    losses = [3.0, 2.0, 2.5, 2.0, 1.9, 2.0, 2.1, 1.9, 1.0]
    assert stops_at(StopRules(max_no_improvement=3), losses) == (
        8,
        "no loss below 1.9 in the last 3 evaluations",
    )
    assert stops_at(StopRules(max_no_improvement=4), losses) is None


def test_change_against_the_past() -> None:
    losses = [4.0, 3.0, 2.0, 1.5, 1.98, 1.51]
    found = stops_at(StopRules(window=2, min_change=0.02), losses)
    assert found == (5, "the loss went from 2 to 1.98 in 2 evaluations, less than 0.02 of itself")
    assert stops_at(StopRules(window=2, min_change=0.001), losses) is None
    assert (
        stops_at(StopRules(window=6, min_change=10.0), losses) is None
    )  # there is no loss six evaluations ago yet


def test_change_against_the_previous() -> None:
    assert stops_at(StopRules(min_relative_change=0.01), [2.0, 1.0, 0.995, 0.5]) == (
        3,
        "the loss went from 1 to 0.995, less than 0.01 of itself",
    )
    assert stops_at(StopRules(min_relative_change=0.01), [0.0, 0.0]) is not None


def test_what_a_checkpoint_keeps_is_enough() -> None:
    rules = StopRules(window=3, min_change=0.01, max_no_improvement=4, min_relative_change=1e-6)
    losses = [5.0, 4.0, 3.5, 3.6, 3.7, 3.52, 3.59, 3.0]
    for cut in range(len(losses)):
        whole = StopState()
        expected = [whole.observe(rules, loss) for loss in losses]
        first = StopState()
        found = [first.observe(rules, loss) for loss in losses[:cut]]
        second = StopState(**asdict(first))
        assert found + [second.observe(rules, loss) for loss in losses[cut:]] == expected
        assert second == whole
