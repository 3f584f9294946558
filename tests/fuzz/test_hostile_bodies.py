"""The fuzzer of bodies draws what it says."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from controlplane.api.inference.engine_call import engine_call
from controlplane.traffic.route_table import Route
from testkit.fuzz import hostile_bodies
from testkit.fuzz.hostile_bodies import COUNTED, GOOD_FIELDS, GOOD_FIELDS_OF, GOOD_GRAMMARS, PATHS

BASE = Route("base", "base", hostile_bodies.MAX_OUTPUT, None, 0.0)


@pytest.mark.parametrize("path", PATHS)
def test_a_good_body_passes_the_gateway(path: str) -> None:
    drawn: Counter[str] = Counter()
    for seed in range(500):
        body = hostile_bodies.good(path, Random(seed))
        assert body == hostile_bodies.good(path, Random(seed))
        engine_call(path, body, BASE, tenant=COUNTED)
        drawn.update([*body, json.dumps(body.get("structured_outputs"))])
    assert drawn.keys() >= {*GOOD_FIELDS, *GOOD_FIELDS_OF[path], *map(json.dumps, GOOD_GRAMMARS)}
