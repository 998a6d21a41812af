from __future__ import annotations

import pytest
from mixes import CALC, SUMS, Results, result, run_here, write_mix


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of the two pipelines learns by itself, on the same workers."""
    found: Results = {}
    for name, run in (("a", SUMS), ("b", CALC)):
        folder = tmp_path_factory.mktemp(f"alone-{name}")
        run_here(write_mix(folder, "serial", **{name: run}), folder / "out")
        found[name] = result(folder / "out" / name)
    return found
