"""No configuration, however strange, gives an error without a type. ``MESHWRIGHT_FUZZ=3000`` tries more of them."""

import os

from tests.train.fuzz import content, run

COUNT = int(os.environ.get("MESHWRIGHT_FUZZ", "60"))


def test_strange_configurations_are_planned_or_refused() -> None:
    ends, failures = run(range(COUNT))
    assert not failures, next(iter(failures.values()))
    assert sum(ends.values()) == COUNT
    assert {"planned", "ConfigError"} <= ends.keys()


def test_a_number_is_a_configuration() -> None:
    assert repr(content(5)) == repr(content(5)) != repr(content(6))
