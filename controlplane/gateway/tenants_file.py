"""Reads and checks the file of tenants."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from controlplane.settings import Settings
from controlplane.state.terms import TENANT_NAME, Priority, Role
from controlplane.traffic.tenants import (
    DEFAULT,
    DEFAULT_NAME,
    ONE_TENANT,
    Quota,
    Tenant,
    Tenants,
    salt_of,
)

_QUOTAS = (
    "requestsPerMinute",
    "tokensPerMinute",
    "maxVariants",
    "maxHostBytes",
    "maxBases",
    "maxEngines",
)
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0  # sums of tokens by weight stay exact enough for comparisons
_FIELDS = ("name", "keys", "role", "weight", "maxWaiting", "maxPriority", *_QUOTAS)
_NAME = re.compile(TENANT_NAME)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def tenants_of(settings: Settings) -> Tenants:
    """The tenants of OSTINATO_TENANTS.

    Errors: ValueError, naming what was expected and where, for an unreadable file; also if the installation
    has no key, because then any client might send requests without one.
    """
    if not settings.tenants:
        return ONE_TENANT
    if not settings.api_key:
        raise ValueError(
            "OSTINATO_TENANTS is set without OSTINATO_API_KEY, the installation's own key; set "
            "OSTINATO_API_KEY, too"
        )
    path = Path(settings.tenants)
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ValueError(f"OSTINATO_TENANTS: {path} cannot be read: {e}") from e
    try:
        return tenants_from(document, settings.api_key.encode())
    except ValueError as e:
        raise ValueError(f"OSTINATO_TENANTS: {path}: {e}") from e


def tenants_from(document: Any, secret: bytes = b"") -> Tenants:
    """The tenants of a parsed file. Salts are derived from the `secret` of all gateways. Errors:
    ValueError."""
    listed = document.get("tenants") if isinstance(document, dict) else None
    if not isinstance(listed, list) or len(document) != 1:
        raise ValueError("expected one field, `tenants`, with a list of tenants")
    by_key: dict[str, Tenant] = {}
    names: set[str] = {DEFAULT_NAME}
    for number, entry in enumerate(listed):
        where = f"tenants[{number}]"
        tenant = _tenant(where, entry, secret)
        if tenant.name in names:
            raise ValueError(
                f"{where}.name: expected a different name for each tenant, other than 'default', got "
                f"{tenant.name!r}"
            )
        names.add(tenant.name)
        for key in _keys(where, entry):
            if key in by_key:
                raise ValueError(
                    f"{where}.keys: {key[:8]}... is already a key of '{by_key[key].name}'; make a new key "
                    "for this tenant"
                )
            by_key[key] = tenant
    return Tenants(by_key, replace(DEFAULT, cache_salt=salt_of(DEFAULT_NAME, secret)) if by_key else DEFAULT)


def _tenant(where: str, entry: Any, secret: bytes) -> Tenant:
    if not isinstance(entry, dict):
        raise _unexpected(where, "an object", entry)
    for name in entry:
        if name not in _FIELDS:
            raise _unexpected(where, f"fields {', '.join(_FIELDS)}", name)
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _unexpected(f"{where}.name", "1 to 63 letters, digits, '.', '_' or '-'", name)
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise _unexpected(f"{where}.weight", f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}", weight)
    most = _count(where, entry, "maxWaiting")
    priority = entry.get("maxPriority", Priority.HIGH)
    if priority not in list(Priority):
        raise _unexpected(f"{where}.maxPriority", f"one of {', '.join(Priority)}", priority)
    role = entry.get("role", Role.INFERENCE)
    if role not in list(Role):
        raise _unexpected(f"{where}.role", f"one of {', '.join(Role)}", role)
    quota = _quota(where, entry)
    if role == Role.ADMIN and quota.is_of_records:
        raise ValueError(
            f"{where}: limits do not apply to a tenant with the role admin; leave the max... fields out"
        )
    salt = salt_of(name, secret)
    return Tenant(name, float(weight), most, Priority(priority), Role(role), quota, salt)


def _quota(where: str, entry: dict[str, Any]) -> Quota:
    return Quota(*(_count(where, entry, name) for name in _QUOTAS))


def _count(where: str, entry: dict[str, Any], name: str) -> int | None:
    value = entry.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise _unexpected(f"{where}.{name}", "a whole number, 1 or more", value)
    return value


def _keys(where: str, entry: dict[str, Any]) -> list[str]:
    keys = entry.get("keys")
    if not isinstance(keys, list) or not keys:
        raise _unexpected(f"{where}.keys", "a list of the SHA-256 of keys, in hexadecimal digits", keys)
    for key in keys:
        if not isinstance(key, str) or not _SHA256.fullmatch(key):
            raise _unexpected(f"{where}.keys", "64 lower-case hexadecimal digits (`sha256sum`)", key)
    return keys


def _unexpected(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{where}: expected {expected}; got {str(value)[:80]!r}")
