"""The credentials that each source gets. They are read where they are used, and written nowhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.fetching.messages import UNREADABLE, FetchError

ANY = "*"


@dataclass(frozen=True)
class Credentials:
    """`hub` is a token; `s3` and `gs` are options of the clients; `web` maps hosts to bearer tokens.

    `own`: the installation's, so clients may also find credentials in the environment, as they usually do.
    """

    own: bool = True
    hub: str = field(default="", repr=False)
    s3: dict[str, str] = field(default_factory=dict, repr=False)
    gs: str = field(default="", repr=False)
    web: dict[str, str] = field(default_factory=dict, repr=False)


def credentials_of(tenant: str, file: str) -> Credentials:
    """The entry of a tenant, or the entry `*`. The installation ("") has its environment and the entry "".

    Errors: FetchError, which does not quote the file.
    """
    entries = _read(Path(file)) if file else {}
    entry = entries.get(tenant, entries.get(ANY, {}))
    try:
        s3, web = entry.get("s3") or {}, entry.get("https") or {}
        return Credentials(
            own=not tenant,
            hub=str(entry.get("hf") or ""),
            s3={name: str(s3[name]) for name in ("key", "secret", "token") if name in s3},
            gs=str(entry.get("gs") or ""),
            web={str(host): str(token) for host, token in web.items()},
        )
    except (AttributeError, TypeError) as e:
        raise _unreadable(file) from e


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise _unreadable(str(file)) from e
    if not isinstance(found, dict):
        raise _unreadable(str(file))
    return {str(name or ""): entry for name, entry in found.items()}


def _unreadable(file: str) -> FetchError:
    return FetchError(
        UNREADABLE,
        f"OSTINATO_SOURCE_CREDENTIALS names {Path(file).name}, which is not a file of credentials; "
        "docs/models.md#sources has an example",
    )
