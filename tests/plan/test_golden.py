"""Plans stay what they are where a change does not mean to change them."""

import json

import pytest

from tests.plan import golden

WERE = json.loads(golden.KEPT.read_text())


def test_every_configuration_is_kept():
    assert set(WERE) == set(golden.CONFIGURATIONS)


@pytest.mark.parametrize("name", golden.CONFIGURATIONS)
@pytest.mark.few(3)
def test_the_plan_and_the_schedule_of_a_configuration_are_what_they_were(name, monkeypatch):
    golden.known(monkeypatch)
    assert golden.answer(golden.CONFIGURATIONS[name]) == WERE[name]
