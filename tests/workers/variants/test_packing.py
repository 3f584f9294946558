"""Variants are read and packed in a few threads: what comes of it, also when a file is not sound."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import math
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from profiler.checkpoint import read_model
from profiler.errors import CheckpointError
from profiler.types import TensorRef
from profiler.variants.reading import read_manifest
from profiler.variants.types import FileRef, VariantLimits
from profiler.variants.verifying import read_stretches, stretches_bytes, tensors_of
from testkit import random_adapters, random_variants
from testkit.random_adapters import MLP, RandomLora
from testkit.random_variants import RandomDelta
from workers.kernels.types import Part, views
from workers.variant_config import VariantConfig
from workers.variants import copies, pages
from workers.variants.copies import MatrixCopy
from workers.variants.host import HostVariant, Room, pack
from workers.variants.kinds import lora as lora_kind
from workers.variants.kinds import open_variant
from workers.variants.layer_weights import LayerWeights
from workers.variants.loader_threads import MAX_THREADS, Job, LoaderThreads, run_here, threads_for
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape
from workers.variants.tensors import Buffers, File

WAIT_S = 60
HIDDEN, INNER, LAYERS = 64, 128, 2
CONFIG = VariantConfig(1, 1 << 30, 1 << 30, 16)
LIMITS = VariantLimits(CONFIG.max_rank)
LORA = RandomLora("l", 8, seed=1, modules=MLP)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    return random_variants.write_tiny_base(tmp_path_factory.mktemp("base") / "base", **sizes)


@pytest.fixture(scope="module")
def delta(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_variants.write(base, tmp_path_factory.mktemp("delta") / "delta", RandomDelta("d", 1))


def layers() -> list[LayerShape]:
    """Linears of two shapes, and norms, in each layer's file."""
    found: list[LayerShape] = [NormShape("model.norm", HIDDEN)]
    for number in range(LAYERS):
        at = f"model.layers.{number}."
        both = tuple(Slice(f"{at}mlp.{name}_proj", 0, INNER, INNER) for name in ("gate", "up"))
        down = (Slice(f"{at}mlp.down_proj", 0, HIDDEN, HIDDEN),)
        found.append(NormShape(f"{at}input_layernorm", HIDDEN))
        found.append(LinearShape(f"{at}mlp.gate_up_proj", both, 0, HIDDEN, HIDDEN))
        found.append(LinearShape(f"{at}mlp.down_proj", down, 0, INNER, INNER))
    return found


def packed(folder: Path, base: Path, threads: LoaderThreads | None) -> HostVariant:
    return pack(open_variant(folder, read_model(base), CONFIG), layers(), torch.float32, False, threads)


def test_threads_change_nothing(base: Path, delta: Path) -> None:
    alone, together = packed(delta, base, None), packed(delta, base, LoaderThreads(3))
    for one, other in zip(alone.entries, together.entries, strict=True):
        assert (one.key, one.parts, one.row_at(0)) == (other.key, other.parts, other.row_at(0))
    spans = [slice(e.start, e.start + e.parts[0].size_bytes) for e in alone.entries]
    assert len(spans) == 1 + 3 * LAYERS
    assert all(torch.equal(alone.memory[span], together.memory[span]) for span in spans)


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapters.write(base, tmp_path_factory.mktemp("lora") / "lora", LORA)


def test_layers_of_one_file_are_read_in_parallel(base: Path, lora: Path) -> None:
    """An adapter's file has no checksum: it need not be read whole in turn."""
    opened = open_variant(lora, read_model(base), CONFIG)
    weights = [w for layer in layers() for w in opened.layer_weights(layer, torch.float32)]
    assert len(weights) == 2 * LAYERS
    assert len({id(each) for own in weights for each in own.files}) == len(weights)
    assert all(own.copies for own in weights)
    alone, together = packed(lora, base, None), packed(lora, base, LoaderThreads(3))
    assert len(alone.entries) == len(weights)
    for one, other in zip(alone.entries, together.entries, strict=True):
        assert (one.key, one.parts, one.row_at(0)) == (other.key, other.parts, other.row_at(0))
        span = slice(one.start, one.start + sum(part.size_bytes for part in one.parts))
        assert torch.equal(alone.memory[span], together.memory[span])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_compiled_copies_give_what_torch_gives(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """A rank that has a part of each layer, some of it without an adapter."""
    folder = random_adapters.write(
        base, tmp_path / "lora", RandomLora("l", 8, seed=1, modules=("up_proj", "down_proj"))
    )
    (path,) = folder.glob("*.safetensors")
    save_file({name: value.to(stored) for name, value in load_file(path).items()}, path)
    halves: list[LayerShape] = []
    for number in range(LAYERS):
        at = f"model.layers.{number}.mlp."
        both = tuple(Slice(f"{at}{name}_proj", INNER // 2, INNER // 2, INNER) for name in ("gate", "up"))
        halves.append(LinearShape(f"{at}gate_up_proj", both, 0, HIDDEN, HIDDEN))
        down = (Slice(f"{at}down_proj", 0, HIDDEN, HIDDEN),)
        halves.append(LinearShape(f"{at}down_proj", down, INNER // 2, INNER // 2, INNER))

    def all_of_it() -> HostVariant:
        return pack(open_variant(folder, read_model(base), CONFIG), halves, dtype, False, LoaderThreads(2))

    ours = all_of_it()
    monkeypatch.setattr(lora_kind, "possible", lambda *asked: False)
    torchs = all_of_it()
    assert [entry.row_at(0) for entry in ours.entries] == [entry.row_at(0) for entry in torchs.entries]
    assert len(ours.entries) == 2 * LAYERS
    for entry in ours.entries:
        for name, part in views(ours.memory, entry.parts, entry.start).items():
            assert part.any()
            assert torch.equal(part, views(torchs.memory, entry.parts, entry.start)[name])


def stored(folder: Path, tensors: list[tuple[str, int, int]]) -> tuple[FileRef, list[TensorRef]]:
    """A file with these tensors of random bytes: (type, first byte, bytes) each."""
    size = max(offset + count for _, offset, count in tensors) + 3
    (folder / "some").write_bytes(os.urandom(size))
    refs = [
        TensorRef("some", f"t{n}", kind, (count,), at, count) for n, (kind, at, count) in enumerate(tensors)
    ]
    return FileRef("some", size), refs


@given(
    st.lists(
        st.tuples(st.sampled_from(["F16", "BF16", "F32"]), st.integers(0, 9), st.integers(1, 40)), min_size=1
    ),
    st.integers(0, 3),
)
def test_stretches_are_their_tensors_bytes(pieces: list[tuple[str, int, int]], first: int) -> None:
    """The arrays have gaps between some of them, any order, odd first bytes and several types."""
    tensors, at = [], first
    for kind, gap, values in pieces:
        size = values * (4 if kind == "F32" else 2)
        tensors.append((kind, at + gap, size))
        at += gap + size
    with tempfile.TemporaryDirectory() as name:
        file, refs = stored(Path(name), tensors)
        into = memoryview(bytearray(stretches_bytes(refs)))
        begins = read_stretches(Path(name), file, refs[::-1], into)
        whole = (Path(name) / "some").read_bytes()
    for ref in refs:
        start = begins[ref]
        assert start % (4 if ref.dtype == "F32" else 2) == 0
        assert into[start : start + ref.size_bytes] == whole[ref.offset : ref.offset + ref.size_bytes]
    spans = sorted((begins[ref], begins[ref] + ref.size_bytes) for ref in refs)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_stretch_of_another_file_is_refused(tmp_path: Path) -> None:
    file, refs = stored(tmp_path, [("F16", 0, 8)])
    for size in (file.size_bytes - 1, file.size_bytes + 1):
        with pytest.raises(CheckpointError, match="no longer has"):
            read_stretches(tmp_path, FileRef("some", size), refs, memoryview(bytearray(128)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_row": 1},
        {"columns": slice(0, 4)},
        {"transposed": True},
        {"rows": slice(0, 1), "transposed": True},
    ],
)
def test_a_copy_that_is_no_part_of_its_part_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "some").write_bytes(bytes(4 * 5 * 2))
    file = File(tmp_path, FileRef("some", 40))
    ref, part = TensorRef("some", "a", "F16", (4, 5), 0, 40), Part("a", torch.bfloat16, (4, 5))
    copy, memory = MatrixCopy(file, ref, slice(None), slice(None), part), torch.zeros(128, dtype=torch.uint8)
    (job,) = copies.jobs([(copy, 0)], memory, Buffers(), 1)
    job()
    (job,) = copies.jobs([(replace(copy, **wrong), 0)], memory, Buffers(), 1)
    with pytest.raises(ValueError, match=r"a has \d rows of"):
        job()


def test_a_file_is_shared_by_threads_in_its_order(base: Path, tmp_path: Path) -> None:
    """In parts that are worth a thread's start."""
    weights = open_variant(random_adapters.write(base, tmp_path / "l", LORA), read_model(base), CONFIG)
    placed = [
        (copy, 0)
        for layer in layers()
        for own in weights.layer_weights(layer, torch.float32)
        for copy in own.copies
    ]
    memory, total = torch.zeros(0, dtype=torch.uint8), sum(copy.ref.size_bytes for copy, _ in placed)
    assert len(copies.jobs(placed, memory, Buffers(), 4)) == -(-total // copies.LEAST_BYTES)
    many = [
        (replace(copy, ref=replace(copy.ref, size_bytes=copies.MOST_BYTES)), start) for copy, start in placed
    ]
    assert len(copies.jobs(many, memory, Buffers(), 1)) == len(placed)  # though one thread does them all
    shares = copies._shares(placed, total // 4)
    assert 3 <= len(shares) <= 5
    offsets = [copy.ref.offset for share in shares for copy, _ in share]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(placed)


def test_an_unsound_tensor_of_a_single_file_is_refused_too(base: Path, tmp_path: Path) -> None:
    folder = random_adapters.write(base, tmp_path / "lora", LORA)
    opened = open_variant(folder, read_model(base), CONFIG)
    (path,) = folder.glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + struct.pack("<f", math.inf))
    last = max(
        (ref for ref in tensors_of(read_manifest(folder, read_model(base), LIMITS))),
        key=lambda ref: ref.offset,
    )
    where = ", ".join(str(size - 1) for size in last.shape)
    with pytest.raises(
        ValueError, match=rf"{re.escape(last.name)} has a value that is not finite at \[{where}\]"
    ):
        pack(opened, layers(), torch.float32, False, LoaderThreads(2))
    os.truncate(path, len(whole) - 4)
    with pytest.raises(ValueError, match="no longer has"):
        pack(opened, layers(), torch.float32, False, LoaderThreads(2))


@pytest.mark.parametrize("count", [0, 2])
def test_a_damaged_file_is_refused_and_the_threads_go_on(
    base: Path, delta: Path, tmp_path: Path, count: int
) -> None:
    folder = random_variants.write(base, tmp_path / "delta", RandomDelta("d", 1))
    path = folder / "layer-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    threads = LoaderThreads(count) if count else None
    with pytest.raises(ValueError, match=r"layer-00001.*corrupt"):
        packed(folder, base, threads)
    assert packed(delta, base, threads).size_bytes  # those threads are still of use


@pytest.mark.parametrize("count", [0, 2])
def test_a_damaged_file_is_named_rather_than_what_was_made_of_it(
    base: Path, tmp_path: Path, count: int
) -> None:
    """Though its weights do not wait until it is verified."""
    folder = random_variants.write(base, tmp_path / "delta", RandomDelta("d", 1))
    opened = open_variant(folder, read_model(base), CONFIG)
    path = folder / "layer-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    tried = []

    class Unfit:
        def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> list[LayerWeights]:
            return [replace(weights, fill=self.fill) for weights in opened.layer_weights(layer, dtype)]

        def fill(self, into: Mapping[str, torch.Tensor]) -> None:
            tried.append(into)
            raise ValueError("a code does not fit")

    threads = LoaderThreads(count) if count else None
    with pytest.raises(ValueError, match=r": a code does not fit"):
        pack(Unfit(), layers(), torch.float32, False, threads)
    path.write_bytes(raw)
    damaged = [layer for layer in layers() if ".1." in layer.name]
    with pytest.raises(ValueError, match=r"layer-00001.*corrupt"):
        pack(Unfit(), damaged, torch.float32, False, threads)
    assert tried


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(base: Path, tmp_path: Path) -> None:
    """The failure is no signal that ends the engine, as for reads of mapped memory."""
    folder = random_variants.write(base, tmp_path / "delta", RandomDelta("d", 1))
    opened = open_variant(folder, read_model(base), CONFIG)
    os.truncate(folder / "layer-00000.safetensors", 100)
    with pytest.raises(ValueError, match="no longer has"):
        pack(opened, layers(), torch.float32, pinned=False)


def test_a_variant_that_never_fits_is_refused_before_it_is_read(base: Path, tmp_path: Path) -> None:
    folder = random_variants.write(base, tmp_path / "delta", RandomDelta("d", 1))
    opened = open_variant(folder, read_model(base), CONFIG)
    os.truncate(folder / "layer-00000.safetensors", 100)
    with pytest.raises(ValueError, match="only 1000 are reserved"):
        pack(opened, layers(), torch.float32, False, None, Room(1000))


def test_weights_of_several_files_wait_for_all_of_them(base: Path, delta: Path) -> None:
    """None of our own writers makes such a delta."""
    opened = open_variant(delta, read_model(base), CONFIG)
    held = {f for layer in layers() for p in opened.layer_weights(layer, torch.float32) for f in p.files}
    files = {each for each in held if isinstance(each, File)}
    assert files == held
    seen: list[bool] = []

    class Spread:
        def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> list[LayerWeights]:
            used = tuple(sorted(files, key=lambda f: f.ref.name)[: 1 if layer.name == "a" else None])
            parts = (Part("x", torch.uint8, (128,)),)
            return [
                LayerWeights(
                    layer.name,
                    "norm",
                    parts,
                    lambda into: seen.append(all(file.data for file in used)),
                    lambda at: (1, at["x"]),
                    files=used,
                )
            ]

    pack(Spread(), [NormShape(name, 8) for name in "aba"], torch.float32, False, LoaderThreads(2))
    assert seen == [True] * 3
    assert not any(file.data for file in files)


def test_buffers_are_used_again_and_never_shared() -> None:
    buffers = Buffers()
    with buffers.borrowed(64) as one, buffers.borrowed(16) as other:
        one[:], other[:] = 1, 2
        assert (len(one), one.max(), len(other), other.min()) == (64, 1, 16, 2)
    with buffers.borrowed(8) as small, buffers.borrowed(64) as large:
        assert (len(small), len(large)) == (8, 64)
        assert small.ctypes.data in {one.ctypes.data, other.ctypes.data}


def locking(monkeypatch: pytest.MonkeyPatch, refused: int | None = None) -> list[tuple[Any, ...]]:
    """The calls of the GPU's driver; it is a stand-in, and refuses the lock of this number."""
    calls: list[tuple[Any, ...]] = []

    def lock(address: int, size: int, flags: int) -> int:
        calls.append(("lock", address, size, ctypes.string_at(address, size)))
        return int(len(calls) - 1 == refused)

    def unlock(address: int) -> None:
        calls.append(("unlock", address))

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pages, "CHUNK_BYTES", mmap.PAGESIZE)
    return calls


def test_memory_is_page_locked_once_it_is_full_and_unlocked_when_it_goes(
    base: Path, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is locked as with a GPU; in chunks, between which its driver does other work. An embedding
    that stays, too."""
    embedding = VocabularyShape("model.embed_tokens", 0, 64, 64, HIDDEN, is_head=False, tied=True)
    opened, shapes = open_variant(delta, read_model(base), CONFIG), [*layers(), embedding]
    expected, calls = pack(opened, shapes, torch.float32, pinned=False), locking(monkeypatch)
    held = pack(opened, shapes, torch.float32, pinned=True)
    assert held.staying.numel() == 64 * HIDDEN + 64 * 4  # a difference: codes, and scales
    assert held.memory.data_ptr() % mmap.PAGESIZE == held.staying.data_ptr() % mmap.PAGESIZE == 0
    locked = list(calls)
    assert len(locked) > 2
    assert [call[:3] for call in locked] == [
        ("lock", each.data_ptr(), each.numel())
        for memory in (held.memory, held.staying)
        for each in pages.chunks(memory)
    ]
    contents = b"".join(memory.numpy().tobytes() for memory in (expected.memory, expected.staying))
    assert b"".join(call[3] for call in locked) == contents
    del held
    gc.collect()
    assert sorted(calls[len(locked) :]) == sorted(("unlock", call[1]) for call in locked)


def test_memory_that_cannot_be_locked_is_copied_to_some_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, memory = locking(monkeypatch, refused=2), torch.from_numpy(pages.whole_pages(1 << 16))
    copied = memory.clone()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copied)
    assert pages.page_locked(memory) is copied
    assert [call[0] for call in calls] == ["lock", "lock", "lock", "unlock", "unlock"]
    assert [call[1] for call in calls[3:]] == [call[1] for call in calls[:2]]


# --- the threads ------------------------------------------------------------------------------------


def test_callers_take_turns() -> None:
    threads, order = LoaderThreads(1), []
    gate, waiting = threading.Event(), threading.Event()

    def first() -> None:
        waiting.set()
        assert gate.wait(WAIT_S)

    def caller(name: str) -> threading.Thread:
        made = threading.Thread(target=threads.run, args=([lambda: order.append(name)] * 3,))
        made.start()
        return made

    large = threading.Thread(target=threads.run, args=([first, *[lambda: order.append("large")] * 3],))
    large.start()
    assert waiting.wait(WAIT_S)
    small = caller("small")
    while len(threads._callers) < 2:
        pass
    gate.set()
    for each in (large, small):
        each.join(WAIT_S)
    assert order[:4] in (["large", "small"] * 2, ["small", "large"] * 2)
    assert sorted(order) == ["large"] * 3 + ["small"] * 3


@pytest.mark.parametrize("count", [0, 1, 3])
def test_follow_up_work_of_a_job_precedes_other_jobs(count: int) -> None:
    order: list[str] = []

    def job(name: str, *given: Job) -> Job:
        def work() -> Sequence[Job]:
            order.append(name)
            return given

        return work

    run = LoaderThreads(count).run if count else run_here
    run([job("a", job("a1", job("a11")), job("a2")), job("b"), job("c", job("c1"))])
    assert sorted(order) == ["a", "a1", "a11", "a2", "b", "c", "c1"]
    if count < 2:
        assert order == sorted(order)


def test_follow_up_work_of_a_job_may_fail_too() -> None:
    threads = LoaderThreads(2)

    def fail() -> None:
        raise ValueError("not sound")

    with pytest.raises(ValueError, match="not sound"):
        threads.run([lambda: [lambda: None, fail, lambda: None]])
    done: list[int] = []
    threads.run([lambda: [lambda: done.append(1)]])
    assert done == [1]


def test_the_first_error_comes_back_once_nothing_runs_any_more() -> None:
    threads, done = LoaderThreads(2), []
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("not sound")

    def slow() -> None:
        assert failed.wait(WAIT_S)
        done.append("slow")

    with pytest.raises(ValueError, match="not sound"):
        threads.run([slow, fail, *[lambda: done.append("later")] * 50])
    assert "slow" in done
    before = list(done)
    threads.run([])
    threads.run([lambda: done.append("next")])
    assert done == [*before, "next"]


def test_threads_are_few() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_for(1) == max(1, min(MAX_THREADS, cores // 2))
    assert threads_for(1000) == 1


LOOKED_AT = """
import json, os, threading, torch
from workers.variants.loader_threads import LoaderThreads
torch.set_num_threads(2)
inside, later = [], []
LoaderThreads(2).run([lambda: inside.append((torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)))])
stranger = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
stranger.start()
stranger.join()
print(json.dumps([*inside[0], torch.get_num_threads(), later[0], os.getpriority(os.PRIO_PROCESS, 0)]))
"""


@pytest.mark.slow
def test_threads_take_no_others_with_them() -> None:
    """In a process of its own: an engine that ran in this one has bound its threads."""
    ran = subprocess.run([sys.executable, "-c", LOOKED_AT], capture_output=True, text=True, check=True)
    threads, niceness, mine, strangers, usual = json.loads(ran.stdout)
    assert threads == 1
    assert niceness > usual or niceness == 19
    assert mine == strangers == 2
