"""Names that a run folder needs for itself are refused wherever somebody could give them to a pipeline or a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jigsawrl.config.pipelines import checked_mix
from jigsawrl.config.reserved import RESERVED
from jigsawrl.errors import JigsawError


def refused(*names: str) -> str:
    with pytest.raises(JigsawError) as raised:
        checked_mix({"pipelines": {name: {"run": "a.yaml"} for name in names}})
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_no_pipeline_has_the_name_of_a_file_of_the_run(name: str) -> None:
    assert (
        refused(name)
        == f"pipelines.{name}: '{name}' is the name of one of a run folder's own files; choose another"
    )
    assert "is the name of one" in refused(name.upper())


def test_names_that_differ_in_case_only_are_refused() -> None:
    assert refused("sums", "Sums") == "pipelines: Sums and sums differ in case only; rename one"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "-a", ".a", "a\n", "a" * 101, "a b", "é", "a\0"]
)
def test_names_that_are_no_folder_names_are_refused(name: str) -> None:
    assert "cannot name a folder" in refused(name)


def test_ordinary_names_are_not() -> None:
    for name in ("stores", "a..b", "model", "config", "profile", "a" * 100, json.dumps(1), Path("x.y").name):
        checked_mix({"pipelines": {name: {"run": "a.yaml"}}})
