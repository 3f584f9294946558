"""Errors do not reveal the server's folders: who may read them, and where a path ends."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.api import hidden_paths
from controlplane.settings import Settings

SETTINGS = Settings(home=Path("/srv/home"), allowed_roots="/data/models:/srv/more", artifacts="/srv/deltas")
CASES = [
    ("cannot read /srv/home/models/m/config.json: no", "cannot read config.json: no"),
    ("'/srv/home' is full", "'home' is full"),
    ("see /srv/home.", "see home."),
    ("see /srv/home/a/b.log, or ask", "see b.log, or ask"),
    ("/srv/deltas/v-12/delta.json is torn", "delta.json is torn"),
    (f"{sysconfig.get_path('purelib')}/vllm/engine.py:12: oh", "engine.py:12: oh"),
    # These texts are not our folders, though they begin alike, or no paths at all.
    ("/srv/homes/x", "/srv/homes/x"),
    ("/srv/home-2/x", "/srv/home-2/x"),
    ("/backup/srv/home/x", "/backup/srv/home/x"),
    (
        "send it to POST /v1/completions; GET /docs lists all",
        "send it to POST /v1/completions; GET /docs lists all",
    ),
]


@pytest.mark.parametrize(("told", "left"), CASES)
def test_no_caller_reads_paths_of_the_installation_s_folders(told: str, left: str) -> None:
    for hide in (hidden_paths.for_managers(SETTINGS), hidden_paths.for_tenants(SETTINGS)):
        error = errors.EngineFailed(told, param="p", details={"a": 1}, retry_after_s=3)
        found = hide(error)
        assert found.message == left
        assert (type(found), found.param, found.details, found.retry_after_s) == (
            errors.EngineFailed,
            "p",
            {"a": 1},
            3,
        )


def test_only_managing_callers_see_the_folders_of_models() -> None:
    error = errors.SourceUnreadable("'/data/models/team-a/x' and /srv/more/y/z.bin")
    assert hidden_paths.for_managers(SETTINGS)(error) is error
    assert hidden_paths.for_tenants(SETTINGS)(error).message == "'x' and z.bin"
