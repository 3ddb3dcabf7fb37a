"""For all tests: engines wait at barriers as the served one does, and where everything must be there a skip is a failure."""

import os

import pytest

from paceline.engine.process import OPENMP_ENVIRONMENT

# Before torch is loaded.
for _name, _value in OPENMP_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """PACELINE_REQUIRE_ALL=1: what a test needs and does not find is a failure."""
    report = yield
    if report.skipped and os.environ.get("PACELINE_REQUIRE_ALL") == "1":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, but PACELINE_REQUIRE_ALL is set: {report.longrepr}"
    return report
