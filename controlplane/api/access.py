"""The role that each call of the API needs. A call that is not listed needs an admin's.

The model's owner is checked later (`controlplane/management/ownership.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from controlplane import errors
from controlplane.state.terms import Role
from controlplane.traffic.endpoints import ENDPOINTS
from controlplane.traffic.tenants import Tenant

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/ping", "/docs"})
ASKING_PATHS = frozenset({*ENDPOINTS, "/inference_model"})

_CALLS: Mapping[Role, str] = {
    Role.INFERENCE: """
        POST /inference_model
        GET /v1/models
        GET /v1/models/{name:path}
        GET /version
        GET /openapi.json
    """,
    Role.DEPLOYER: """
        POST /v1/load_lora_adapter
        POST /v1/unload_lora_adapter
        POST /register_model
        POST /deploy_model
        POST /plan
        GET /models
        GET /models/{name:path}
        DELETE /models/{name:path}
        GET /models/{name:path}/profile
        POST /models/{name:path}/profile
        POST /models/{name:path}/estimate
        POST /models/{name:path}/plans
        GET /models/{name:path}/evaluations
        PUT /models/{name:path}/evaluations
        GET /deployments
        GET /deployments/{name:path}
        PATCH /deployments/{name:path}
        DELETE /deployments/{name:path}
        POST /deployments/{name:path}/prefetch
        GET /deployments/{name:path}/logs
        GET /operations
        GET /operations/{operation_id}
        GET /operations/{operation_id}/watch
        POST /operations/{operation_id}/cancel
        GET /status
    """,
    # These calls show or change other tenants' data.
    Role.ADMIN: """
        GET /cluster
        POST /rebalance
        GET /metrics
        GET /metrics/targets
    """,
}
# The needed role by method and path, as in the application's routes.
NEEDED: Mapping[tuple[str, str], Role] = MappingProxyType(
    {
        (method, path): role
        for role, calls in _CALLS.items()
        for method, path in (call.split() for call in calls.strip().splitlines())
    }
    | {("POST", path): Role.INFERENCE for path in ENDPOINTS}
)
_PATTERNS = tuple(
    (method, re.compile(re.sub(r"{\w+}", "[^/]+", re.sub(r"{\w+:path}", ".+", path)), re.DOTALL), role)
    for (method, path), role in NEEDED.items()
    if "{" in path
)
_LEVELS = {role: level for level, role in enumerate(Role)}


def needed_role(method: str, path: str) -> Role:
    """The role that a request needs; HEAD counts as GET."""
    method = "GET" if method == "HEAD" else method
    exact = NEEDED.get((method, path))
    if exact is not None:
        return exact
    matching = (role for known, pattern, role in _PATTERNS if known == method and pattern.fullmatch(path))
    return next(matching, Role.ADMIN)


def require_role(tenant: Tenant, method: str, path: str) -> None:
    """Require the role that a call needs. Errors: Forbidden."""
    if tenant.is_admin:
        return
    needed = needed_role(method, path)
    if _LEVELS[tenant.role] < _LEVELS[needed]:
        raise errors.Forbidden(
            f"{method} {path[:200]} needs the role {needed}, but the key of tenant '{tenant.name}' has the "
            f"role {tenant.role}; use a key with the role {needed}"
        )
