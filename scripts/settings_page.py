"""Write docs/settings.md from `controlplane/settings.py`: `python scripts/settings_page.py`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from controlplane.settings import Settings

PAGE = Path(__file__).parents[1] / "docs/settings.md"
HEAD = """# Settings

Which environment variables configure an installation? Each is read when a process starts. `ostinato up`
refuses a variable `OSTINATO_...` that is not listed here. In the Helm chart a setting is
`settings.<camelCase>`, or an entry of `extraEnv`. `python scripts/settings_page.py` writes this page from
`controlplane/settings.py`.

| variable | default | meaning |
|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(_row(name, field) for name, field in Settings.model_fields.items())


def _row(name: str, field: FieldInfo) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `OSTINATO_{name.upper()}` | {_default(name, field.default)} | {meaning} |\n"


def _default(name: str, value: Any) -> str:
    if name == "home":
        return "`~/.ostinato`"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        gib = value / (1 << 30)
        return f"{gib:g} GiB" if value >= 1 << 30 else f"{value >> 20} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
