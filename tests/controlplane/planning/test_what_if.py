"""What `ostinato plan` says of a model with a config is what deploying it would do."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from controlplane import errors
from controlplane.api import preview
from controlplane.api.services import fresh_context
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning.placement_decision import decide
from controlplane.planning.what_if import what_if
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model, Phase
from controlplane.state.repository import State
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.rebalancing import less
from placement.solver.outcome import NotPlaced
from placement.solver.schema import read_form
from placement.types import Device, Intent, Inventory, Placement
from profiler.types import DeviceRates, ModelSpec
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec
from testkit.controlplane.builders import state
from testkit.known_models import llama, llama_config

GIB = 1 << 30
SETTINGS = Settings(home=Path("/nowhere"))
TYPES = {"H200": (4.8e12, 9.89e14, 140), "mine": (6e11, 2e14, 24)}
SHAPES = (
    (30, 576, 9, 3, 1536, 49152),
    (32, 4096, 32, 8, 14336, 128256),
    (40, 5120, 40, 8, 13824, 32000),
)  # layers, hidden, heads, KV heads, intermediate, vocabulary


def spec_of(shape: tuple[int, ...]) -> ModelSpec:
    layers, hidden, heads, kv, inter, vocab = shape
    return llama(layers, hidden, heads, kv, inter, vocab, 2, tied=False)


class Case:
    """A cluster and a deployment, as a file of `ostinato plan`, and as the controller sees them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.shape = rng.choice(SHAPES)
        self.nodes = [self._node(rng, name) for name in "ab"[: rng.randint(1, 2)]]
        self.ranks = [rng.choice((8, 64, 128)) for _ in range(rng.choice((0, 0, 3, 12)))]
        self.intent = rng.choice(tuple(Intent))
        self.slos = {
            "tpot_s": rng.choice((None, None, 0.02, 0.2)),
            "latency_s": rng.choice((None, None, 30.0)),
        }
        self.load = {
            "rate_per_s": rng.choice((0.0, 0.0, 0.5, 4.0)),
            "input_tokens": rng.choice((None, 200)),
            "output_tokens": rng.choice((None, 100)),
        }
        self.sizes = {
            "context": rng.choice((None, None, 512, 4096)),
            "concurrency": rng.choice((None, None, 7, 300)),
            "slots": rng.choice((None, 5)),
            "lora_rank": rng.choice((None, 128)),
        }
        self.tp = rng.choice(([], [], [1], [1, 2]))

    def _node(self, rng: random.Random, name: str) -> dict[str, Any]:
        kind = rng.choice(tuple(TYPES))
        total = TYPES[kind][2]
        gpus = [
            {"type": kind, "total_gib": total, "free_gib": rng.choice((total, rng.uniform(1, total)))}
            for _ in range(rng.randint(1, 3))
        ]
        return {"name": name, "gpus": gpus}

    def file(self) -> dict[str, Any]:
        given = {name: value for name, value in (self.load | self.sizes).items() if value is not None}
        deployment = {
            "name": "m",
            "model": {"config": "."},
            "intent": self.intent,
            "slos": {name: limit for name, limit in self.slos.items() if limit},
            "tp": self.tp,
            "variants": [{"rank": rank} for rank in self.ranks],
            **given,
        }
        types = {name: {"memory_gb_per_s": b / 1e9, "tflops": f / 1e12} for name, (b, f, _) in TYPES.items()}
        return {"cluster": {"nodes": self.nodes, "types": types}, "deployments": [deployment]}

    def inventory(self) -> Inventory:
        devices = []
        for node in self.nodes:
            for index, gpu in enumerate(node["gpus"]):
                bandwidth, flops, total = TYPES[gpu["type"]]
                free = round(gpu["free_gib"] * GIB)
                rates = DeviceRates(bandwidth, flops)
                kind = gpu["type"]
                made = Device(node["name"], index, kind, total * GIB, free, rates, kind, nvlink_domain=index)
                devices.append(made)
        return Inventory(tuple(devices))

    def models(self) -> list[Model]:
        spec = spec_of(self.shape)
        base = Model("m", 1, Phase.READY, source="/m", path="/m", spec=spec, compression={"none": 1.0})
        return [base, *(self._adapter(spec, number, rank) for number, rank in enumerate(self.ranks))]

    def _adapter(self, spec: ModelSpec, number: int, rank: int) -> Model:
        modules = {
            name: ModuleFacts(2 * rank * (out + into), rank)
            for name, (out, into) in spec.linear_shapes.items()
        }
        size = spec.num_layers * sum(facts.size_bytes for facts in modules.values())
        variant = VariantSpec(VariantKind.LORA, size, modules)
        return Model(f"v{number}", 2 + number, Phase.READY, base="m", path="/v", variant_spec=variant)

    def request(self) -> DeployModelRequest:
        slos = {"tpot_ms": self.slos["tpot_s"], "e2e_ms": self.slos["latency_s"]}
        body = {
            "model": "m",
            "intent": self.intent,
            "SLOs": {name: limit and limit * 1000 for name, limit in slos.items()},
            "load": {
                "ratePerS": self.load["rate_per_s"],
                "inputTokens": self.load["input_tokens"],
                "outputTokens": self.load["output_tokens"],
            },
            "engine": {
                "contextTokens": self.sizes["context"],
                "requestsAtOnce": self.sizes["concurrency"],
                "variantSlots": self.sizes["slots"],
                "loraRank": self.sizes["lora_rank"],
            },
            "tensorParallel": self.tp,
        }
        return DeployModelRequest.model_validate(body)


def deployed_or_refused(case: Case, now: State) -> preview.Preview | errors.NoFeasiblePlan:
    try:
        return preview.preview(now, case.inventory(), SETTINGS, case.request(), fresh_context())
    except errors.NoFeasiblePlan as refusal:
        return refusal


def check(folder: Path, seed: int) -> bool:
    """Whether it was placed."""
    case = Case(seed)
    (folder / "config.json").write_text(json.dumps(llama_config(*case.shape)))
    ((_, planned),) = what_if(read_form(case.file()), folder, SETTINGS).outcomes
    now = state(*case.models())
    deployed = deployed_or_refused(case, now)
    if isinstance(deployed, errors.NoFeasiblePlan):
        assert isinstance(planned, NotPlaced), deployed.message
        offered = [one["factor"] for one in deployed.details["relaxations"]]
        assert offered == pytest.approx([relaxation.factor for relaxation in planned.relaxations])
        return False
    assert isinstance(planned, Placement), planned
    assert planned == deployed.placement
    assert planned.choice.sizes
    assert planned.choice.sizes in planned.reason
    return True


@examples(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_plan_says_what_deploying_would_do(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    check(tmp_path_factory.mktemp("plan"), seed)


@pytest.mark.slow
@examples(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_plan_says_what_deploying_would_do_in_many_more_cases(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    check(tmp_path_factory.mktemp("plan"), seed)


def test_both_outcomes_occur(tmp_path: Path) -> None:
    assert {check(tmp_path, seed) for seed in range(16)} == {True, False}


def test_a_second_deployment_has_what_the_first_one_left(tmp_path: Path) -> None:
    """As after the first one's reservations, and with its expected load."""
    (tmp_path / "config.json").write_text(json.dumps(llama_config(*SHAPES[1])))
    gpu = {"type": "H200", "total_gib": 140}
    first = {"name": "a", "model": {"config": "."}, "intent": "minLat", "rate_per_s": 2}
    file = {
        "cluster": {"nodes": [{"name": "n", "gpus": [gpu]}]},
        "deployments": [first, {"name": "b", "model": {"config": "."}, "intent": "minCost"}],
    }
    (_, one), (_, two) = what_if(read_form(file), tmp_path, SETTINGS).outcomes
    assert isinstance(one, Placement)
    free = int(140 * GIB) - int(SETTINGS.headroom * 140 * GIB)
    device = Device("n", 0, "H200", 140 * GIB, free, DeviceRates(4.8e12, 9.89e14), "H200")
    base = Model("b", 1, Phase.READY, path="/b", spec=spec_of(SHAPES[1]), compression={"none": 1.0})
    wanted = Deployment("a", 1, "a", Phase.DEPLOYED, Intent.MIN_LATENCY, None)
    placed = replace(wanted, groups=(WorkerGroup(0, GroupPhase.SERVING, one),))
    after = less(Inventory((device,)), [one])
    second = replace(wanted, model="b", base="b", phase=Phase.PENDING, intent=Intent.MIN_COST)
    assert two == decide(base, second, after, SETTINGS, others=[placed])


def test_the_ceilings_of_the_installation_bound_the_sizes_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config(*SHAPES[0])))
    gpu = {"type": "H200", "total_gib": 140}
    deployment = {"name": "a", "model": {"config": "."}, "intent": "minLat"}
    file = {"cluster": {"nodes": [{"name": "n", "gpus": [gpu]}]}, "deployments": [deployment]}
    bounded = SETTINGS.model_copy(update={"max_model_len": 1024, "concurrency": 24})
    ((_, placed),) = what_if(read_form(file), tmp_path, bounded).outcomes
    assert isinstance(placed, Placement)
    assert (placed.plan.max_model_len, placed.plan.sequences) == (1024, 24)
    assert "context 1,024 (the installation's limit), 24 requests at once" in placed.choice.sizes
