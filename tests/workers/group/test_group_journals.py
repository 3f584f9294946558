"""Which rank is to blame when a group does not start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from workers.group.journal import READY, Entry, Journal, last_lines, read, suspects, verdict

LOADING = "loading weights"


def test_the_rank_that_raised_is_to_blame(tmp_path: Path) -> None:
    for rank in (0, 2):
        with pytest.raises(SystemExit), Journal(tmp_path, rank).doing(LOADING):
            raise SystemExit  # as vLLM's handler of SIGTERM does
    with pytest.raises(ValueError, match="shapes"), Journal(tmp_path, 1).doing(LOADING):
        raise ValueError("shapes\n  differ")
    assert (
        verdict(tmp_path, (0, 1, 2), "?") == "rank 1 failed while loading weights: ValueError: shapes differ"
    )


def test_a_dead_rank_is_named_with_the_rank_that_lost_its_connection(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), Journal(tmp_path, 0).doing("claiming its device"):
        raise ConnectionError("closed by peer")
    Journal(tmp_path, 1).write(LOADING)
    said = verdict(tmp_path, (0, 1), "?")
    assert said.startswith(
        "rank 0 failed while claiming its device: ConnectionError: closed by peer; rank 1 ("
    )
    assert said.endswith("ended without an error while loading weights")


def test_a_rank_that_ended_without_a_word_is_named_with_the_last_of_its_log(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    with journal.doing(LOADING):
        for line in range(9):
            logging.getLogger("vllm.loader").warning("shard %d", line)
    said = verdict(tmp_path, (0,), "?")
    assert said.startswith("rank 0 (process ")
    assert "ended without an error while loading weights" in said
    assert said.endswith(" / ".join(f"WARNING shard {line}" for line in range(4, 9)))
    assert len(last_lines(tmp_path, 0)) == 5


def test_no_rank_is_blamed_for_serving_or_for_a_requested_end(tmp_path: Path) -> None:
    entries = {0: Entry(0, 1, LOADING, told=True), 1: Entry(1, 2, READY)}
    assert suspects(entries, (0, 1)) == ([], [])
    assert verdict(tmp_path, (0, 1), "vLLM said so") == "vLLM said so"
    assert (read(tmp_path), last_lines(tmp_path, 0)) == ({}, [])


def test_all_silent_ranks_are_named() -> None:
    entries = {rank: Entry(rank, rank, LOADING) for rank in range(3)}
    assert [entry.rank for entry in suspects(entries, (0, 2))[1]] == [0, 2]
