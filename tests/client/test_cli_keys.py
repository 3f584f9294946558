"""`ostinato keys new`: a key, and the entry that lets a gateway know it."""

from __future__ import annotations

import json

import yaml

from controlplane.gateway.tenants_file import tenants_from
from controlplane.state.terms import Role
from testkit.client.command_line import Cli


def test_the_entry_is_that_of_the_key(cli: Cli) -> None:
    shown = cli("keys", "new", "--tenant", "research", "--role", "deployer")
    key, _, rest = shown.out.partition("\n")
    tenants = tenants_from({"tenants": yaml.safe_load(rest[rest.index("  - name") :])})
    tenant = tenants.of_key(key.encode())
    assert tenant is not None
    assert (shown.code, tenant.name, tenant.role) == (0, "research", Role.DEPLOYER)
    assert len(key) >= 40
    assert shown.out.count(key) == 1
    assert shown.err == ""


def test_keys_are_new_each_time_and_come_as_json(cli: Cli) -> None:
    made = [cli("keys", "new", "--json").json for _ in range(2)]
    assert made[0]["key"] != made[1]["key"]
    for each in made:
        found = tenants_from({"tenants": [each["entry"]]}).of_key(each["key"].encode())
        assert found is not None
        assert found.role is Role.INFERENCE
    json.dumps(made)


def test_a_wrong_key_is_explained(cli: Cli) -> None:
    for wrong in (("--tenant", "a b"), ("--tenant", "default"), ("--role", "root")):
        assert cli("keys", "new", *wrong).code == 2
    assert cli("keys", "old").code == 2
