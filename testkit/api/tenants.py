"""Tenants for tests: the file that names them, and requests with their keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from testkit.api.installations import Installation, Start

OWN_KEY = "key-of-the-installation"
ROLES = {"reader": "inference", "maker": "deployer", "other": "deployer", "chief": "admin"}


def key_of(name: str) -> str:
    return f"secret-key-of-{name}"


def entry(name: str, role: str = "inference", **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "keys": [sha256(key_of(name).encode()).hexdigest()], **more}


def write(path: Path, *entries: dict[str, Any]) -> None:
    path.write_text(json.dumps({"tenants": list(entries)}))


def started(start: Start, path: Path, *entries: dict[str, Any], **options: Any) -> Installation:
    """An installation with these tenants; by default one of each role, and a second deployer. By default
    they share their files."""
    write(path, *(entries or (entry(name, role) for name, role in ROLES.items())))
    return start(api_key=OWN_KEY, tenants=str(path), **{"tenant_folders": False, **options})


@dataclass(frozen=True)
class As:
    """Requests with a tenant's key."""

    installation: Installation
    name: str

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key_of(self.name)}"} | headers
        return self.installation.http.request(method, path, json=body, headers=headers)

    def end(self, accepted: httpx.Response) -> dict[str, Any]:
        """Wait for an operation, and return it as the tenant sees it."""
        self.installation.end(accepted)
        seen: dict[str, Any] = self.ask("GET", f"/operations/{accepted.json()['id']}").json()
        return seen

    def register(self, name: str, base: str = "base", folder: str = "v1") -> dict[str, Any]:
        where = str(self.installation.files / folder)
        files = {"base": base, "adapter": where} if base else {"source": where}
        return self.end(self.ask("POST", "/register_model", {"model": name, **files}))

    def deploy(self, name: str) -> dict[str, Any]:
        return self.end(self.ask("POST", "/deploy_model", {"model": name, "maxOutputLength": 32}))

    def complete(self, model: str = "base", **more: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", {"model": model, "prompt": "a b", **more})


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]
