"""The cache salt of a request: it separates the KV blocks of tenants and variants, and identifies the tenant.

A salt is made of parts: the tenant's secret, the variant's uid, the client's own salt.
"""

from __future__ import annotations

from hashlib import sha256

from workers.messages import VariantRef

_SEPARATOR = ":"
_MAX_CHARACTERS = 128  # that vLLM accepts
_REFUSED = frozenset("@/\\\0")  # by vLLM: they have a meaning for stores of KV blocks


def cache_salt(tenant: str, variant: VariantRef | None, given: object) -> str | None:
    """The salt of a request with the client's `given` salt: it reaches the caches of this tenant and this uid
    only. `tenant` is "" if the installation has one tenant. None: the client's own salt needs no other part.

    A client's salt is hashed if it is too long, or has characters that vLLM refuses.
    """
    own = _SEPARATOR.join(([tenant] if tenant else []) + ([str(variant.uid)] if variant else []))
    if not own:
        return None
    text = f"{own}{_SEPARATOR}{given or ''}"
    if len(text) <= _MAX_CHARACTERS and _REFUSED.isdisjoint(text):
        return text
    return f"{own}{_SEPARATOR}{sha256(text.encode(errors='replace')).hexdigest()}"


def tenant_of(salt: str | None) -> str:
    """What identifies the tenant in a salt. In an installation with one tenant this tells nothing."""
    return (salt or "").partition(_SEPARATOR)[0]
