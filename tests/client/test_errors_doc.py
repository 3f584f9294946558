"""docs/errors.md and the command line's hints name exactly the errors that exist."""

from __future__ import annotations

import re
from pathlib import Path

from controlplane import errors
from controlplane.cli.failures import HINTS
from controlplane.errors import error_classes

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| `(?P<code>\w+)` \| (?P<status>\d{3}) \| (?P<meaning>[^|]+) \| (?P<remedy>[^|]+) \|$", re.M
)


def test_every_error_is_documented_with_its_status() -> None:
    rows = [row.groupdict() for row in ROW.finditer((ROOT / "docs/errors.md").read_text())]
    documented = [(row["code"], int(row["status"])) for row in rows]
    assert sorted(documented) == sorted((cls.code, cls.status) for cls in error_classes().values())
    assert all(row["meaning"].strip() and row["remedy"].strip() for row in rows)


def test_every_error_has_a_code_of_its_own() -> None:
    defined = [
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OstinatoError)
    ]
    assert len({cls.code for cls in defined}) == len(defined)
    assert set(defined) == set(error_classes().values())


def test_every_error_has_a_hint() -> None:
    assert HINTS.keys() == error_classes().keys()
