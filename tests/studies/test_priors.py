"""What the package ships for ``prior: public`` is the law of the recorded results."""

import pytest

from studies.priors import run


@pytest.mark.quick
def test_the_package_ships_what_was_measured():
    rows = run.SHEET.read(run.SHEET.folder / "results.csv")
    assert run.PACKAGE.read_text("utf-8") == run.shipped(rows)
    readme = (run.SHEET.folder / "README.md").read_text("utf-8")
    assert f"the median {run.law_of(rows)['median']:g} is" in readme
