"""The connections that Kubernetes' NetworkPolicies permit, by their meaning: the ports of a Pod that another
Pod reaches. Knows what the chart uses, and fails on anything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

EVERY_PORT = frozenset(range(1, 65536))


@dataclass(frozen=True)
class Pod:
    """Where a Pod runs, and what it is called."""

    namespace: str
    labels: dict[str, str]
    namespace_labels: dict[str, str]


def pod(namespace: str, labels: dict[str, str]) -> Pod:
    """Kubernetes labels every namespace with its own name."""
    return Pod(namespace, labels, {"kubernetes.io/metadata.name": namespace})


def reachable(policies: list[Object], source: Pod, target: Pod) -> frozenset[int]:
    """The TCP ports of `target` that `source` reaches: all of them where no policy is about the target's
    incoming traffic, else what the policies about it allow together."""
    about = [policy for policy in policies if _is_about(policy, target)]
    if not about:
        return EVERY_PORT
    allowed = [
        _ports(rule)
        for policy in about
        for rule in policy["spec"].get("ingress", [])
        if _lets_in(rule, source, policy["metadata"]["namespace"])
    ]
    return frozenset().union(*allowed)


def _is_about(policy: Object, target: Pod) -> bool:
    spec = policy["spec"]
    return (
        policy["metadata"]["namespace"] == target.namespace
        and "Ingress" in spec.get("policyTypes", ["Ingress"])
        and selects(spec["podSelector"], target.labels)
    )


def _lets_in(rule: Object, source: Pod, namespace: str) -> bool:
    """A rule without peers is one for everybody."""
    peers = rule.get("from") or []
    return not peers or any(_is(peer, source, namespace) for peer in peers)


def _is(peer: Object, source: Pod, namespace: str) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector", "ipBlock"}, peer
    if "ipBlock" in peer:
        return False  # no Pod's address is known here
    in_namespace = (
        selects(peer["namespaceSelector"], source.namespace_labels)
        if "namespaceSelector" in peer
        else source.namespace == namespace
    )
    return in_namespace and selects(peer.get("podSelector", {}), source.labels)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector, all of whose parts must hold, selects what bears these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _ports(rule: Object) -> frozenset[int]:
    """A rule without ports is one for all of them."""
    if not (given := rule.get("ports") or []):
        return EVERY_PORT
    assert all(isinstance(each["port"], int) for each in given), given
    return frozenset(
        number
        for each in given
        if each.get("protocol", "TCP") == "TCP"
        for number in range(each["port"], each.get("endPort", each["port"]) + 1)
    )
