"""The file of tenants: what it may say, and what is said of one that is wrong."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from controlplane.gateway.tenants_file import tenants_from, tenants_of
from controlplane.settings import Settings
from controlplane.state.terms import Priority, Role
from controlplane.traffic.tenants import ONE_TENANT, Quota, Tenant

KEYS = [sha256(key).hexdigest() for key in (b"one", b"two", b"three")]


def of(**fields: Any) -> dict[str, Any]:
    return {"tenants": [{"name": "a", "keys": KEYS[:1], **fields}]}


def test_tenants_are_found_by_their_keys() -> None:
    tenants = tenants_from(
        {
            "tenants": [
                {"name": "a", "keys": KEYS[:2], "weight": 2, "maxWaiting": 5, "maxPriority": "normal"},
                {"name": "b", "keys": KEYS[2:]},
            ]
        }
    )
    a = Tenant("a", 2.0, 5, Priority.NORMAL)
    assert [tenants.of_key(key) for key in (b"one", b"two", b"three")] == [a, a, Tenant("b")]
    assert tenants.of_key(b"four") is None
    assert tenants.of_key(KEYS[0].encode()) is None, "a hash is no key"
    assert ONE_TENANT.of_key(b"one") is None


def test_roles_and_quotas_are_read() -> None:
    names = ("requestsPerMinute", "tokensPerMinute", "maxVariants", "maxHostBytes", "maxBases", "maxEngines")
    quotas = {name: number for number, name in enumerate(names, start=1)}
    tenant = tenants_from(of(role="deployer", **quotas)).of_key(b"one")
    assert tenant == Tenant("a", role=Role.DEPLOYER, quota=Quota(1, 2, 3, 4, 5, 6))
    for role in Role:
        found = tenants_from(of(role=role)).of_key(b"one")
        assert found is not None
        assert (found.role, found.quota) == (role, Quota())


def test_salts_are_one_for_each_tenant_and_secret() -> None:
    def salts(secret: bytes) -> list[str]:
        document = {"tenants": [*of()["tenants"], {"name": "b", "keys": KEYS[1:2]}]}
        tenants = tenants_from(document, secret)
        found = [tenants.installation, *tenants.by_key.values()]
        return [tenant.cache_salt for tenant in found]

    made = [*salts(b"k"), *salts(b"other")]
    assert len(set(made)) == 6
    assert salts(b"k") == made[:3], "all gateways have the same"
    assert tenants_from({"tenants": []}, b"k").installation.cache_salt == "", "one tenant needs none"


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (None, "`tenants`"),
        ([], "`tenants`"),
        ({"tenants": {}}, "`tenants`"),
        ({"tenants": [], "more": 1}, "`tenants`"),
        ({"tenants": ["a"]}, r"tenants\[0\]: expected an object"),
        (of(name=""), r"tenants\[0\].name"),
        (of(name="a b"), r"tenants\[0\].name"),
        (of(name="default"), "a different name for each tenant"),
        (of(speed=1), "speed"),
        (of(weight=0), "weight: expected a number from 0.001 to 1000"),
        (of(weight=1e-308), "weight"),
        (of(weight=1001), "weight"),
        (of(weight=float("nan")), "weight"),
        (of(weight=True), "weight"),
        (of(maxWaiting=0), "maxWaiting"),
        (of(maxWaiting=1.5), "maxWaiting"),
        (of(maxPriority="urgent"), "low, normal, high"),
        (of(role="root"), "inference, deployer, admin"),
        (of(role=["admin"]), "inference, deployer, admin"),
        (of(requestsPerMinute=0), "requestsPerMinute: expected a whole number, 1 or more"),
        (of(tokensPerMinute=1.5), "tokensPerMinute"),
        (of(maxVariants="2"), "maxVariants"),
        (of(maxHostBytes=True), "maxHostBytes"),
        (of(role="admin", maxVariants=1), "a tenant with the role admin"),
        (of(role="admin", maxBases=1), "a tenant with the role admin"),
        (of(role="admin", maxEngines=1), "a tenant with the role admin"),
        (of(keys=[]), "keys"),
        (of(keys=["secret"]), "64 lower-case"),
        (of(keys=[KEYS[0].upper()]), "64 lower-case"),
        (of(keys=KEYS[:1] * 2), "already a key of 'a'"),
        ({"tenants": [*of()["tenants"], *of()["tenants"]]}, "a different name for each tenant"),
        ({"tenants": [*of()["tenants"], *of(name="b")["tenants"]]}, "already a key of 'a'"),
    ],
)
def test_wrong_fields_are_named(document: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tenants_from(document)


def test_a_file_in_json_or_yaml(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    for text in (json.dumps(of()), f"tenants:\n- name: a\n  keys: ['{KEYS[0]}']\n"):
        path.write_text(text)
        assert tenants_of(Settings(tenants=str(path), api_key="k")).of_key(b"one") == Tenant("a")
    assert tenants_of(Settings()) == ONE_TENANT


@pytest.mark.parametrize("text", ["{", "\x00", "tenants: 1"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"OSTINATO_TENANTS: {path}"):
        tenants_of(Settings(tenants=str(path), api_key="k"))
    with pytest.raises(ValueError, match="cannot be read"):
        tenants_of(Settings(tenants=str(tmp_path / "none"), api_key="k"))


def test_tenants_need_a_key_of_the_installation(tmp_path: Path) -> None:
    """Or everybody could do everything."""
    with pytest.raises(ValueError, match="OSTINATO_API_KEY"):
        tenants_of(Settings(tenants=str(tmp_path / "tenants")))
