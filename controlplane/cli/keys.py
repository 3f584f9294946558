"""`ostinato keys`: makes API keys; the installation reads their SHA-256 from its file of tenants."""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from hashlib import sha256
from typing import Annotated

import typer

from controlplane.cli.output import print_json, print_text
from controlplane.cli.session import Json, session
from controlplane.state.terms import TENANT_NAME, Role

PREFIX = "ost-"
_BYTES = 32


class Action(StrEnum):
    NEW = "new"


def _name(value: str) -> str:
    if not re.fullmatch(TENANT_NAME, value) or value == "default":
        raise typer.BadParameter(
            "expected 1 to 63 letters, digits, '.', '_' or '-', other than 'default', which is the "
            f"installation's own tenant, got {value[:80]!r}"
        )
    return value


def keys(
    ctx: typer.Context,
    action: Annotated[Action, typer.Argument(help="new: make a key.")],
    tenant: Annotated[
        str, typer.Option(help="The tenant's name in the file of tenants.", callback=_name)
    ] = "TENANT",
    role: Annotated[Role, typer.Option(help="What the key may do.")] = Role.INFERENCE,
    json: Json = False,
) -> None:
    """Make a new API key for a tenant. `keys new` prints it once.

    The command asks no server and stores nothing. Add the printed entry to the file of OSTINATO_TENANTS,
    which gateways read again when it changes.
    """
    key = PREFIX + secrets.token_urlsafe(_BYTES)
    digest = sha256(key.encode()).hexdigest()
    if session(ctx).json:
        print_json({"key": key, "entry": {"name": tenant, "role": role, "keys": [digest]}})
        return
    print_text(
        f"{key}\n\n"
        "This key is shown only now. Add the entry below to the file of tenants (OSTINATO_TENANTS). If the "
        "file has this tenant already, add only the hash to the tenant's keys.\n\n"
        f'  - name: {tenant}\n    role: {role}\n    keys: ["{digest}"]'
    )
