"""Who asks: tenants by their API keys, and what each may do and have. Pure.

Keys are known by their SHA-256 only, so that neither a file of tenants nor a log holds one.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from controlplane.state.terms import Priority, Role

DEFAULT_NAME = "default"
# Of a key's SHA-256: what logs name a key by.
SHOWN_DIGITS = 8


@dataclass(frozen=True)
class Quota:
    """What a tenant may have; None: any.

    Requests, and tokens of prompts and answers, are those of all gateways. `max_variants` may be registered,
    with `max_host_bytes` in all, and `max_bases`; `max_engines` is what the deployments of its bases may grow
    to, added up.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_variants: int | None = None
    max_host_bytes: int | None = None
    max_bases: int | None = None
    max_engines: int | None = None

    @property
    def is_of_records(self) -> bool:
        """Whether what is registered and deployed is bounded."""
        bounds = (self.max_variants, self.max_host_bytes, self.max_bases, self.max_engines)
        return any(bound is not None for bound in bounds)


NO_QUOTA = Quota()


@dataclass(frozen=True)
class Tenant:
    """`weight` is its share of the engines beside other tenants whose requests wait.

    At most `max_waiting` of its requests wait for one base in one gateway (None: as many as there is room
    for), none of them above `max_priority`. `cache_salt` keeps its KV blocks from other tenants'; "" where
    there is one tenant.
    """

    name: str = DEFAULT_NAME
    weight: float = 1.0
    max_waiting: int | None = None
    max_priority: Priority = Priority.HIGH
    role: Role = Role.INFERENCE
    quota: Quota = NO_QUOTA
    cache_salt: str = field(default="", compare=False)

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    @property
    def owner(self) -> str:
        """Whose the models are that it registers; "": the installation's, which all may use."""
        return "" if self.is_admin else self.name

    def sees(self, owner: str) -> bool:
        """Whether what is this owner's is there for it."""
        return not owner or owner == self.name or self.role is Role.ADMIN

    def may_change(self, owner: str) -> bool:
        return owner == self.name or self.role is Role.ADMIN


# Whose the installation's own key is, and all requests where there is no key.
DEFAULT = Tenant(role=Role.ADMIN)


@dataclass(frozen=True)
class Caller:
    """Who sent a request: a tenant, and the first digits of its key's SHA-256 ("" where there is none)."""

    tenant: Tenant = DEFAULT
    key: str = ""


INSTALLATION = Caller()


@dataclass(frozen=True)
class Tenants:
    """`by_key`: tenants by the SHA-256 of each of their keys, in hexadecimal digits."""

    by_key: Mapping[str, Tenant] = field(default_factory=dict)
    installation: Tenant = DEFAULT

    @property
    def any_rates(self) -> bool:
        """Whether what anybody may ask in a minute is bounded."""
        quotas = [tenant.quota for tenant in self.by_key.values()]
        return any(q.requests_per_minute is not None or q.tokens_per_minute is not None for q in quotas)

    def of_key(self, key: bytes) -> Tenant | None:
        """Whose key it is; None: nobody's."""
        return self.by_key.get(sha256(key).hexdigest()) if self.by_key else None


ONE_TENANT = Tenants()


def shown(key: bytes) -> str:
    """What logs name a key by."""
    return sha256(key).hexdigest()[:SHOWN_DIGITS] if key else ""


def salt_of(name: str, secret: bytes) -> str:
    """Who does not know the secret finds no other tenant's."""
    return hmac.new(secret, b"cache salt of " + name.encode(), sha256).hexdigest()[:32]
