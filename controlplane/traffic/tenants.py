"""Tenants by their API keys, with their permissions and quotas. Pure.

Only the SHA-256 of a key is stored, so that neither a file of tenants nor a log holds a key.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from controlplane.state.terms import Priority, Role

DEFAULT_NAME = "default"
# The digits of a key's SHA-256 by which logs name a key.
SHOWN_DIGITS = 8


@dataclass(frozen=True)
class Quota:
    """The limits of a tenant; None: no limit.

    Requests, and tokens of prompts and answers, are counted over all gateways. At most `max_variants` may be
    registered, with `max_host_bytes` in all, and `max_bases`. `max_engines` limits the sum of the most
    engines that the deployments of its bases may grow to.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_variants: int | None = None
    max_host_bytes: int | None = None
    max_bases: int | None = None
    max_engines: int | None = None

    @property
    def is_of_records(self) -> bool:
        """Whether registrations or deployments are limited."""
        bounds = (self.max_variants, self.max_host_bytes, self.max_bases, self.max_engines)
        return any(bound is not None for bound in bounds)


NO_QUOTA = Quota()


@dataclass(frozen=True)
class Tenant:
    """`weight` is its share of the engines while other tenants' requests wait.

    At most `max_waiting` of its requests wait for one base in one gateway (None: as many as there is room
    for), none of them above `max_priority`. `cache_salt` separates its KV blocks from other tenants'; "" if
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
        """The owner of the models that it registers; "": the installation, whose models all tenants may
        use."""
        return "" if self.is_admin else self.name

    def sees(self, owner: str) -> bool:
        """Whether a model of this owner exists for the tenant."""
        return not owner or owner == self.name or self.role is Role.ADMIN

    def may_change(self, owner: str) -> bool:
        return owner == self.name or self.role is Role.ADMIN


# The tenant of the installation's own key, and of all requests without a key.
DEFAULT = Tenant(role=Role.ADMIN)


@dataclass(frozen=True)
class Caller:
    """The sender of a request: a tenant, and the first digits of its key's SHA-256 ("" without a key)."""

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
        """Whether a tenant's requests or tokens per minute are limited."""
        quotas = [tenant.quota for tenant in self.by_key.values()]
        return any(q.requests_per_minute is not None or q.tokens_per_minute is not None for q in quotas)

    def of_key(self, key: bytes) -> Tenant | None:
        """The tenant with this key; None: no tenant."""
        return self.by_key.get(sha256(key).hexdigest()) if self.by_key else None


ONE_TENANT = Tenants()


def shown(key: bytes) -> str:
    """The name of a key in logs."""
    return sha256(key).hexdigest()[:SHOWN_DIGITS] if key else ""


def salt_of(name: str, secret: bytes) -> str:
    """A tenant's salt, which cannot be guessed without the secret."""
    return hmac.new(secret, b"cache salt of " + name.encode(), sha256).hexdigest()[:32]
