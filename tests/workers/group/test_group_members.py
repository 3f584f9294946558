"""The division of a group into launches of vLLM, and the arguments of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.engine_configs import echo_config, ranks_of
from workers.group.members import Member, Rendezvous, device_environment, members_of, network_arguments
from workers.messages import EngineConfig, RankConfig

MEETING = Rendezvous("10.0.0.1", 4001, "tcp://10.0.0.1:4002")


def group(places: list[tuple[str, int]], tensor_parallel: int = 1, kind: str = "gpu") -> EngineConfig:
    """One rank on each (node, index)."""
    ranks = tuple(RankConfig(2, 10, 5, 0, node, kind, index) for node, index in places)
    return replace(echo_config(), tensor_parallel=tensor_parallel, ranks=ranks)


def test_a_group_on_one_node_is_one_launch_with_its_gpus_in_rank_order() -> None:
    (member,) = members_of(group([("a", 3), ("a", 0), ("a", 7), ("a", 1)], 2))
    assert member == Member(0, "a", (0, 1, 2, 3), (3, 0, 7, 1))
    assert network_arguments((member,), 0, None) == {}
    assert device_environment(member) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "3,0,7,1",
    }


def test_ranks_of_a_cpu_share_it_and_see_no_gpu_setting() -> None:
    (member,) = members_of(group([("a", 0), ("a", 0), ("a", 0)], 3, "cpu"))
    assert (member.ranks, device_environment(member)) == ((0, 1, 2), {})


def test_two_even_nodes_are_two_launches() -> None:
    members = members_of(group([("a", 0), ("a", 1), ("b", 4), ("b", 2)], 2))
    assert members == (Member(0, "a", (0, 1), (0, 1)), Member(1, "b", (2, 3), (4, 2)))
    assert network_arguments(members, 1, MEETING) == {
        "--nnodes": 2,
        "--node-rank": 1,
        "--master-addr": "10.0.0.1",
        "--master-port": 4001,
    }
    with pytest.raises(ValueError, match="where they meet"):
        network_arguments(members, 0, None)


def test_uneven_nodes_take_several_launches_each() -> None:
    members = members_of(group([("a", 0), ("b", 0), ("b", 1)]))
    assert [(m.node, m.ranks, m.gpus) for m in members] == [
        ("a", (0,), (0,)),
        ("b", (1,), (0,)),
        ("b", (2,), (1,)),
    ]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_launches_are_equal_contiguous_and_each_on_one_node(nodes: list[str]) -> None:
    places = [(node, number) for number, node in enumerate(nodes)]
    members = members_of(group(places))
    assert [rank for member in members for rank in member.ranks] == list(range(len(nodes)))
    assert len({len(member.ranks) for member in members}) == 1
    assert [member.number for member in members] == list(range(len(members)))
    for member in members:
        assert {nodes[rank] for rank in member.ranks} == {member.node}
        assert member.gpus == tuple(places[rank][1] for rank in member.ranks)
    if len(set(nodes)) == 1:
        assert len(members) == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (group([("a", 0), ("a", 0)]), "rank 1 shares GPU 0 of a"),
        (group([("a", 0), ("a", 1), ("a", 2)], 2), r"multiple of 2 ranks .*got 3"),
        (replace(echo_config(), ranks=()), "got 0"),
        (
            replace(echo_config(2), ranks=(*ranks_of((1,)), *ranks_of((2,)))),
            r"stage 0 have \[1, 2\] layers",
        ),
        (replace(echo_config(), ranks=(*ranks_of((1,)), *group([("a", 0)]).ranks)), "got both"),
    ],
)
def test_a_group_that_cannot_run_is_refused(config: EngineConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        members_of(config)
