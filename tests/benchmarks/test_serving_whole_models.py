"""The serving benchmark's whole models in host memory and in slots, against the bytes of their files."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.serving import whole_files
from benchmarks.serving.settings import SwapConfig
from benchmarks.serving.whole_models import WholeModels
from workers.bus.sockets import Message, SchedulerSocket
from workers.variants.loader import Cache, Loader

WAIT_S = 60
FILES = 3
# The offsets of the weights below, by hand: each begins at a multiple of 256 bytes.
STARTS = (0, 256, 512)
MODEL_BYTES = 1024
TWO_MODELS = 2 * MODEL_BYTES + MODEL_BYTES // 2  # and not a third


def weights_of_an_engine() -> list[torch.Tensor]:
    """70, 12 and 400 bytes, of two types."""
    return [
        torch.arange(35).to(torch.bfloat16).view(5, 7),
        torch.tensor([0.5, 1.0, 2.0]),
        torch.arange(1000, 1200).to(torch.bfloat16),
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def random_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def write_files(folder: Path) -> tuple[str, ...]:
    """Each longer than a model."""
    for number in range(FILES):
        (folder / str(number)).write_bytes(random_bytes(MODEL_BYTES + 100, number))
    return tuple(str(folder / str(number)) for number in range(FILES))


def file_of(folder: Path, uid: int) -> Path:
    """Models share the files in turn."""
    return folder / str(uid % FILES)


def from_files(folder: Path, weights: Sequence[torch.Tensor], host_bytes: int, slots: int = 2) -> WholeModels:
    return WholeModels(weights, slots, SwapConfig(FILES, 1, write_files(folder), host_bytes))


def parts_of(content: bytes, weights: Sequence[torch.Tensor]) -> list[bytes]:
    """Each weight's part of a file of these bytes."""
    return [content[at : at + weight.nbytes] for at, weight in zip(STARTS, weights, strict=True)]


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [64, 96, 1000, 1 << 20])
@pytest.mark.parametrize("longer", [0, 1, 500])
def test_memory_is_filled_with_the_first_bytes_of_a_file(
    piece: int, longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read in pieces, of which one may be smaller; nothing outside the memory is written."""
    monkeypatch.setattr(whole_files, "PIECE_BYTES", piece)
    content = random_bytes(1000 + longer, seed=piece)
    (tmp_path / "file").write_bytes(content)
    around = np.full(1100, 7, np.uint8)
    whole_files.read_into(tmp_path / "file", around[50:1050])
    assert around.tobytes() == b"\7" * 50 + content[:1000] + b"\7" * 50


def test_the_next_call_reads_what_the_last_call_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may read fewer bytes than requested: here at most 10."""
    read = os.preadv

    def read_few(file: int, buffers: Sequence[Any], start: int) -> int:
        return read(file, [buffers[0][:10]], start)

    monkeypatch.setattr(os, "preadv", read_few)
    monkeypatch.setattr(whole_files, "PIECE_BYTES", 64)
    content = random_bytes(200, seed=1)
    (tmp_path / "file").write_bytes(content)
    memory = np.zeros(200, np.uint8)
    whole_files.read_into(tmp_path / "file", memory)
    assert memory.tobytes() == content


@pytest.mark.parametrize("piece", [64, 100, 1 << 20])
@pytest.mark.parametrize("size", [0, 100, 900, 999])
def test_a_file_that_is_too_short_is_an_error(
    piece: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_files, "PIECE_BYTES", piece)
    (tmp_path / "file").write_bytes(random_bytes(size, seed=1))
    with pytest.raises(EOFError, match=f"ends at byte {size}; expected 1000 bytes"):
        whole_files.read_into(tmp_path / "file", np.zeros(1000, np.uint8))


# --- models in host memory ---------------------------------------------------------------------


def test_the_model_used_longest_ago_leaves_host_memory(tmp_path: Path) -> None:
    """A repeated preparation or placement also counts as a use."""
    models = from_files(tmp_path, weights_of_an_engine(), TWO_MODELS)
    assert [models.holds(uid) for uid in (1, 2, 3)] == [False, False, False]
    models.prepare(1, "")
    models.prepare(2, "")
    assert [models.holds(uid) for uid in (1, 2, 3)] == [True, True, False]
    models.prepare(1, "")
    models.prepare(3, "")
    assert [models.holds(uid) for uid in (1, 2, 3)] == [True, False, True]
    models.place(1, "", 0)
    models.place(2, "", 1)
    assert [models.holds(uid) for uid in (1, 2, 3)] == [True, True, False]


def test_host_memory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{MODEL_BYTES - 1} bytes of host memory; .* {MODEL_BYTES}"):
        from_files(tmp_path, weights_of_an_engine(), MODEL_BYTES - 1)


def test_variants_in_host_memory_are_reported_with_their_bytes(tmp_path: Path) -> None:
    models = from_files(tmp_path, weights_of_an_engine(), TWO_MODELS)
    assert models.in_host() == {}
    assert models.prepare(1, "").device_bytes == MODEL_BYTES
    assert models.in_host() == {1: MODEL_BYTES}
    models.prepare(2, "")
    models.prepare(3, "")
    assert models.in_host() == {2: MODEL_BYTES, 3: MODEL_BYTES}
    models.forget(3)
    assert models.in_host() == {2: MODEL_BYTES}
    assert not models.holds(3)


def test_variants_without_files_are_in_host_memory() -> None:
    """Only requested variants are reported."""
    models = WholeModels(weights_of_an_engine(), 1, SwapConfig(2, 1))
    assert all(models.holds(uid) for uid in range(1, 40))
    assert models.in_host() == {}
    for uid in range(1, 40):
        models.prepare(uid, "")
    assert models.in_host() == dict.fromkeys(range(1, 40), MODEL_BYTES)
    models.forget(7)
    assert models.in_host().keys() == set(range(1, 40)) - {7}
    assert models.holds(7)


def test_a_model_that_has_left_is_read_again_and_one_that_has_not_is_not(tmp_path: Path) -> None:
    """Files change meanwhile, which shows who is read."""
    weights = weights_of_an_engine()
    models = from_files(tmp_path, weights, TWO_MODELS)
    for uid in (1, 2, 3):  # the first one leaves
        models.prepare(uid, "")
    before = file_of(tmp_path, 3).read_bytes()
    for uid in (1, 3):
        file_of(tmp_path, uid).write_bytes(random_bytes(MODEL_BYTES, seed=100 + uid))
    models.place(3, "", 0)
    models.activate(3)
    assert [raw(weight) for weight in weights] == parts_of(before, weights)
    models.place(1, "", 1)
    models.activate(1)
    assert [raw(weight) for weight in weights] == parts_of(random_bytes(MODEL_BYTES, seed=101), weights)


def test_a_model_that_was_forgotten_is_read_again(tmp_path: Path) -> None:
    weights = weights_of_an_engine()
    models = from_files(tmp_path, weights, TWO_MODELS)
    models.prepare(1, "")
    models.forget(1)
    file_of(tmp_path, 1).write_bytes(random_bytes(MODEL_BYTES, seed=100))
    models.place(1, "", 0)
    models.activate(1)
    assert [raw(weight) for weight in weights] == parts_of(random_bytes(MODEL_BYTES, seed=100), weights)


# --- models in slots ---------------------------------------------------------------------------


def test_the_active_models_bytes_are_the_weights(tmp_path: Path) -> None:
    """The active model among several in slots, also after another one was active or came into a slot."""
    weights = weights_of_an_engine()
    models = from_files(tmp_path, weights, 10 * MODEL_BYTES)
    expected = {uid: parts_of(file_of(tmp_path, uid).read_bytes(), weights) for uid in (1, 2, 3)}
    assert [models.place(uid, "", slot) for uid, slot in ((1, 0), (2, 1))] == [MODEL_BYTES, MODEL_BYTES]
    for uid in (1, 2, 1):
        models.activate(uid)
        assert [raw(weight) for weight in weights] == expected[uid]
    models.place(3, "", 1)
    assert models.slot_of == {1: 0, 3: 1}
    assert [raw(weight) for weight in weights] == expected[1]
    models.activate(3)
    assert [raw(weight) for weight in weights] == expected[3]
    models.clear(1)
    assert models.slot_of == {1: 0}


def test_models_without_files_are_the_engine_s_weights_with_shifted_rows() -> None:
    weights = weights_of_an_engine()
    models = WholeModels(weights, 3, SwapConfig(2, 1))
    own = weights_of_an_engine()
    moved = [torch.cat([weight[-1:], weight[:-1]]) for weight in own]
    for uid, slot, expected in ((1, 0, moved), (2, 1, own), (3, 2, moved)):
        models.place(uid, "", slot)
        models.activate(uid)
        assert [raw(weight) for weight in weights] == [raw(weight) for weight in expected]


# --- the loader --------------------------------------------------------------------------------


def test_a_loader_takes_whole_models_for_a_cache(tmp_path: Path) -> None:
    """All messages that it ever gets, at the end of a real line; none of it fails."""
    models = from_files(tmp_path, weights_of_an_engine(), MODEL_BYTES)
    cache: Cache = models
    reports: queue.Queue[Message] = queue.Queue()
    address = f"ipc://{tmp_path}/bus"
    socket = SchedulerSocket(address, lambda sender, message: reports.put(message))
    loader = Loader(address, 0, cache)
    try:
        assert reports.get(timeout=WAIT_S)["did"] == "hello"
        # Prepared, placed from where it is, and placed after it is read, which makes the other one leave.
        told = [("prepare", 1, None, "prepared"), ("place", 1, 0, "placed"), ("place", 2, 1, "placed")]
        for order, (do, uid, slot, did) in enumerate(told):
            message = {"do": do, "order": order, "slot": slot, "uid": uid, "path": ""}
            socket.send(b"rank-0", message)
            report = reports.get(timeout=WAIT_S)
            assert (report["did"], report["uid"], report["slot"], report["order"]) == (did, uid, slot, order)
            assert (report["bytes"], report["streams"]) == (MODEL_BYTES, False)
            assert (report["host"], report["staying"]) == ({str(uid): MODEL_BYTES}, {})
        assert models.slot_of == {1: 0, 2: 1}
        socket.send(b"rank-0", {"do": "clear", "order": 3, "slot": 0})
        socket.send(b"rank-0", {"do": "forget", "order": 4, "uid": 2})
        socket.send(b"rank-0", {"do": "place", "order": 5, "slot": 0, "uid": 3, "path": ""})
        report = reports.get(timeout=WAIT_S)
        assert (report["did"], report["uid"], report["host"]) == ("placed", 3, {"3": MODEL_BYTES})
        loader._placer.shutdown()
        assert models.slot_of == {2: 1, 3: 0}
        assert reports.empty()
    finally:
        loader._socket.close()
        socket.close()
