"""Numbers that no plan can hold are the user's mistake, said as one."""

import pytest

from meshwright.search.settings import read_settings
from meshwright.spec.errors import ConfigError


@pytest.mark.parametrize("value", ["99999999999999999999999", "9" * 5000, "1000000", "\u00b2", "\u0663", "0", "-1"])
def test_a_number_that_no_plan_holds_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of 1 or more"):
        read_settings(f"tp={value}")


def test_the_largest_number_is_read() -> None:
    assert read_settings("tp=999999") == {"tensor": 999999}
