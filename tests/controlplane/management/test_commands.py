"""The changes of each request, and its refusals: on a real store, so that versions count."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from controlplane import errors
from controlplane.management import commands
from controlplane.management.commands import delete_model, deploy_model, register_model, undeploy_model
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.state import operations, transactions
from controlplane.state.records import Deployment, Model, OperationKind, Phase
from controlplane.state.repository import Delete, Put, Repository
from controlplane.state.transactions import Context
from placement.types import Intent
from testkit.in_memory import cancel, submit

BASE = RegisterModelRequest(model="base", source="/m/base")
V1 = RegisterModelRequest(model="v1", base="base", adapter="/m/v1")


def ready(repository: Repository, *requests: RegisterModelRequest) -> None:
    for request in requests:
        submit(repository, register_model, request)
        transactions.edit(
            repository, Model, request.model, lambda m: replace(m, phase=Phase.READY, path="/m")
        )


def deploy(name: str, **options: object) -> DeployModelRequest:
    return DeployModelRequest.model_validate({"model": name, **options})


def test_a_registration_is_pending_and_has_an_operation(repository: Repository) -> None:
    operation = submit(repository, register_model, BASE)
    state = repository.read()
    assert state.models["base"].record.phase is Phase.PENDING
    assert state.operations[operation.id].record == operation
    assert (operation.kind, operation.target, operation.done) == (OperationKind.REGISTER, "base", False)


def test_a_name_is_registered_once(repository: Repository) -> None:
    submit(repository, register_model, BASE)
    with pytest.raises(errors.AlreadyExists) as refusal:
        submit(repository, register_model, BASE)
    assert refusal.value.param == "model"
    assert len(repository.read().operations) == 1


def test_a_variant_needs_a_ready_base(repository: Repository) -> None:
    with pytest.raises(errors.ModelNotFound):
        submit(repository, register_model, V1)
    submit(repository, register_model, BASE)
    with pytest.raises(errors.NotReady):
        submit(repository, register_model, V1)


def test_a_variant_of_a_variant_is_refused(repository: Repository) -> None:
    ready(repository, BASE, V1)
    with pytest.raises(errors.InvalidRequest, match="itself a variant"):
        submit(repository, register_model, RegisterModelRequest(model="v2", base="v1", adapter="/m/v2"))


def test_deploying_needs_a_ready_model_that_is_not_deployed(repository: Repository) -> None:
    with pytest.raises(errors.ModelNotFound):
        submit(repository, deploy_model, deploy("base"))
    submit(repository, register_model, BASE)
    with pytest.raises(errors.NotReady):
        submit(repository, deploy_model, deploy("base"))
    transactions.edit(repository, Model, "base", lambda m: replace(m, phase=Phase.READY))
    submit(repository, deploy_model, deploy("base"))
    with pytest.raises(errors.AlreadyExists):
        submit(repository, deploy_model, deploy("base"))


def test_a_deployment_holds_what_was_asked_for(repository: Repository) -> None:
    ready(repository, BASE)
    request = deploy("base", maxOutputLength=7, intent="latSLO", SLOs={"e2e_ms": 1500})
    submit(repository, deploy_model, request)
    d = repository.read().deployments["base"].record
    assert (d.phase, d.base, d.intent, d.max_output_tokens) == (Phase.PENDING, "base", Intent.MIN_COST, 7)
    assert d.slos.latency_s == 1.5


def test_a_variant_brings_its_base(repository: Repository) -> None:
    ready(repository, BASE, V1)
    operation = submit(repository, deploy_model, deploy("v1"))
    state = repository.read()
    assert {name: d.record.base for name, d in state.deployments.items()} == {"v1": "base", "base": "base"}
    assert "deployed with it" in operation.reason
    assert len({d.record.uid for d in state.deployments.values()}) == 2


def test_a_variant_joins_a_base_that_is_there(repository: Repository) -> None:
    ready(repository, BASE, V1)
    submit(repository, deploy_model, deploy("base", maxOutputLength=99))
    operation = submit(repository, deploy_model, deploy("v1"))
    assert "deployed with it" not in operation.reason
    assert repository.read().deployments["base"].record.max_output_tokens == 99


def test_parsers_are_those_of_a_base_s_engines(repository: Repository) -> None:
    ready(repository, BASE, V1)
    submit(repository, deploy_model, deploy("v1", toolCallParser="hermes", reasoningParser="none"))
    base = repository.read().deployments["base"].record
    assert (base.tool_parser, base.reasoning_parser) == ("hermes", "")
    assert repository.read().deployments["v1"].record.tool_parser is None


@pytest.mark.parametrize("asked", [{"toolCallParser": "hermes"}, {"reasoningParser": "none"}])
def test_a_variant_joins_a_base_with_the_same_parsers_only(
    repository: Repository, asked: dict[str, str]
) -> None:
    ready(repository, BASE, V1)
    submit(repository, deploy_model, deploy("base", toolCallParser="mistral", reasoningParser="qwen3"))
    with pytest.raises(
        errors.InvalidRequest, match=r"whose \w+ is (mistral|qwen3); leave .* out, or undeploy 'base'"
    ):
        submit(repository, deploy_model, deploy("v1", **asked))
    submit(repository, deploy_model, deploy("v1", toolCallParser="mistral"))


def test_an_unknown_parser_is_refused_with_the_known_parsers() -> None:
    with pytest.raises(
        ValueError, match=r"toolCallParser\n.*expected none, or one of .*hermes.*got 'hermse'"
    ):
        deploy("base", toolCallParser="hermse")


@pytest.mark.parametrize(
    ("of_base", "asked", "kept"),
    [(None, 94.05, 99.0), (97.0, 94.05, 99.0), (99.5, 94.05, 99.5), (97.0, None, 97.0), (None, None, None)],
)
def test_a_base_keeps_the_accuracy_that_a_joining_variant_asks_of_it(
    repository: Repository, of_base: float | None, asked: float | None, kept: float | None
) -> None:
    """A base that is not placed yet is brought as well. It stays when the variant leaves."""
    v1 = V1.model_copy(update={"compressionTechnique": {"none": 95.0}})
    ready(repository, BASE, v1)
    submit(repository, deploy_model, deploy("base", SLOs={"accuracy": of_base}))
    submit(repository, deploy_model, deploy("v1", SLOs={"accuracy": asked}))
    wanted = kept and pytest.approx(kept)
    assert repository.read().deployments["base"].record.slos.accuracy == wanted
    submit(repository, undeploy_model, "v1")
    assert repository.read().deployments["base"].record.slos.accuracy == wanted


def test_a_variant_does_not_join_a_base_that_leaves(repository: Repository) -> None:
    ready(repository, BASE, V1)
    submit(repository, deploy_model, deploy("base"))
    submit(repository, undeploy_model, "base")
    with pytest.raises(errors.NotReady):
        submit(repository, deploy_model, deploy("v1"))


def test_undeploying_marks_the_deployment(repository: Repository) -> None:
    ready(repository, BASE, V1)
    with pytest.raises(errors.NotDeployed):
        submit(repository, undeploy_model, "base")
    submit(repository, deploy_model, deploy("v1"))
    with pytest.raises(errors.InUse) as refusal:
        submit(repository, undeploy_model, "base")
    assert refusal.value.details == {"used_by": ["v1"]}
    submit(repository, undeploy_model, "v1")
    assert repository.read().deployments["v1"].record.phase is Phase.DELETING


def test_deleting_removes_the_model(repository: Repository) -> None:
    with pytest.raises(errors.ModelNotFound):
        submit(repository, delete_model, "base")
    submit(repository, register_model, BASE)
    with pytest.raises(errors.InUse):
        submit(repository, delete_model, "base")
    transactions.edit(repository, Model, "base", lambda m: replace(m, phase=Phase.READY))
    ready(repository, V1)
    with pytest.raises(errors.InUse) as refusal:
        submit(repository, delete_model, "base")
    assert refusal.value.details == {"used_by": ["v1"]}
    submit(repository, deploy_model, deploy("v1"))
    with pytest.raises(errors.InUse):
        submit(repository, delete_model, "v1")


def test_a_deletion_is_done_at_once(repository: Repository) -> None:
    ready(repository, BASE)
    operation = submit(repository, delete_model, "base")
    assert (operation.phase, operation.done, operation.progress) == (Phase.DELETED, True, 1.0)
    assert repository.read().models == {}


def test_cancelling_marks_the_operation(repository: Repository) -> None:
    with pytest.raises(errors.OperationNotFound):
        cancel(repository, "op-0")
    operation = submit(repository, register_model, BASE)
    asked = cancel(repository, operation.id)
    assert asked.cancel_requested
    assert not asked.done
    assert cancel(repository, operation.id) == asked
    transactions.edit(repository, Model, "base", lambda m: replace(m, phase=Phase.READY))
    gone = submit(repository, delete_model, "base")
    assert cancel(repository, gone.id) == gone


def test_an_undeployment_is_not_cancelled(repository: Repository) -> None:
    ready(repository, BASE)
    submit(repository, deploy_model, deploy("base"))
    operation = submit(repository, undeploy_model, "base")
    with pytest.raises(errors.InvalidRequest):
        cancel(repository, operation.id)


CTX = Context("op-x", (1, 2), 1.0)


def test_every_change_expects_the_version_it_was_decided_on(repository: Repository) -> None:
    ready(repository, BASE, V1)
    state = repository.read()
    base, v1 = state.models["base"], state.models["v1"]
    assert commands.delete_model(state, "v1", CTX).changes[0] == Delete(Model, "v1", v1.version)
    assert Put(base.record, base.version) in register_model(state, replace_name(V1, "v2"), CTX).changes
    assert Put(v1.record, v1.version) in deploy_model(state, deploy("v1"), CTX).changes
    assert all(c.expected_version is not None for c in deploy_model(state, deploy("v1"), CTX).changes)


def replace_name(request: RegisterModelRequest, name: str) -> RegisterModelRequest:
    return request.model_copy(update={"model": name})


@pytest.mark.parametrize("deletion_first", [True, False])
def test_deleting_and_deploying_at_once(repository: Repository, deletion_first: bool) -> None:
    """Decided on the same state, one of the two must fail: else a deployment without a model stays."""
    ready(repository, BASE)
    state = repository.read()
    one, other = Context("op-1", (1, 2), 1.0), Context("op-2", (3, 4), 1.0)
    outcomes = [delete_model(state, "base", one), deploy_model(state, deploy("base"), other)]
    first, second = outcomes if deletion_first else reversed(outcomes)
    repository.commit(first.changes)
    with pytest.raises(errors.StaleWrite):
        repository.commit(second.changes)


def test_a_variant_does_not_race_its_leaving_base(repository: Repository) -> None:
    ready(repository, BASE, V1)
    submit(repository, deploy_model, deploy("base"))
    state = repository.read()
    joining = deploy_model(state, deploy("v1"), CTX)
    submit(repository, undeploy_model, "base")
    with pytest.raises(errors.StaleWrite):
        repository.commit(joining.changes)


def test_exactly_one_of_concurrent_registrations_of_a_name_wins(repository: Repository) -> None:
    def attempt(source: int) -> str:
        request = RegisterModelRequest(model="base", source=f"/m/{source}")
        try:
            return submit(repository, register_model, request).id
        except errors.AlreadyExists:
            return ""

    with ThreadPoolExecutor(8) as pool:
        winners = [i for i in pool.map(attempt, range(16)) if i]
    assert list(repository.read().operations) == winners
    assert len(winners) == 1


def test_many_variants_of_one_base_register_at_once(repository: Repository) -> None:
    ready(repository, BASE)
    names = [f"v{n}" for n in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: submit(repository, register_model, replace_name(V1, n)), names))
    assert set(repository.read().models) == {"base", *names}


def test_a_repeated_message_adds_no_event_and_events_are_bounded(repository: Repository) -> None:
    operation = submit(repository, register_model, BASE)
    again = operations.advance(operation, operation.phase, operation.reason, 9.0)
    assert again.events == operation.events
    for n in range(100):
        again = operations.advance(again, Phase.PROFILING, f"step {n}", float(n))
    assert len(again.events) == 64
    assert again.events[-1].message == "step 99"


def test_a_change_of_what_is_gone_is_refused(repository: Repository) -> None:
    with pytest.raises(transactions.Superseded):
        transactions.edit(repository, Deployment, "none", lambda d: d)
