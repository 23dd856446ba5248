"""Objectives: each is one file with an entry in the registry, and says which options it takes."""

from pkgutil import iter_modules

import numpy as np
import pytest

from llamatrain.preference import objectives
from llamatrain.preference.options import PreferenceOptions
from llamatrain.preference.registry import OBJECTIVES, get_objective

OPTIONS = {
    "orpo": {"beta"},
    "dpo": {"beta"},
    "simpo": {"beta", "gamma"},
    "kto": {"beta", "desirable_weight", "undesirable_weight"},
}


def test_each_file_has_an_entry() -> None:
    assert {module.name for module in iter_modules(objectives.__path__)} == {*OBJECTIVES}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_set_the_fields(name: str) -> None:
    objective = get_objective(name)
    assert objective.option_names() == OPTIONS[name]
    built = PreferenceOptions(objective=name, gamma=3.0).built
    assert isinstance(built, objective) and built.beta == objective.default_beta
    given = PreferenceOptions(objective=name, beta=0.5).built
    assert given and given.beta == 0.5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_has_no_weight(name: str) -> None:
    built = PreferenceOptions(objective=name, desirable_weight=2.0, undesirable_weight=3.0).built
    assert built
    sides = np.array([1, 0], np.float32) if built.compares_pairs else np.array([1, -1, 0], np.float32)
    expected = [1, 0] if built.compares_pairs else [2, 3, 0]
    assert built.unit_weights(sides).tolist() == expected
