from paceline.prove.statistics.holm import holm, holm_levels


def test_the_smallest_p_is_tested_at_the_strictest_level() -> None:
    assert holm_levels([0.03, 0.001, 0.2], 0.06) == (0.03, 0.02, 0.06)


def test_nothing_stands_after_the_first_that_falls() -> None:
    assert holm([0.03, 0.001, 0.2], 0.06) == (True, True, False)
    assert holm([0.03, 0.021, 0.05], 0.06) == (False, False, False)  # each alone, at 0.06, would stand
