"""The kernels in CUDA: which batches they serve, how work is cut up, and the check before they are used.

They themselves are run where there is a GPU: by that check, and by the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from testkit.kernels.batches import CPU
from tests.kernels.svd_delta.test_svd_delta import weights
from workers.kernels import nvrtc, svd_delta
from workers.kernels.rows import LARGE_BLOCK, SMALL_BLOCK, Rows, Tiles
from workers.kernels.svd_delta import layout, reference, tensor_cores
from workers.kernels.svd_delta import tensor_cores_check as check
from workers.kernels.svd_delta.plan import SPARE_PLACES, Plan, Scratch
from workers.kernels.types import total_bytes, views

SHARED_BYTES = 227 * 1024  # that a block of threads may have on a Hopper
MULTIPROCESSOR_BYTES, OF_EACH_BLOCK = 228 * 1024, 1024

Launch = Callable[..., None]


@pytest.mark.parametrize("cut", tensor_cores.CUTS)
def test_the_compiled_number_of_blocks_fits_a_multiprocessor(cut: tensor_cores.Cut) -> None:
    for config in (cut.shrink, cut.expand):
        assert config.shared_bytes <= SHARED_BYTES
        assert config.blocks * (config.shared_bytes + OF_EACH_BLOCK) <= MULTIPROCESSOR_BYTES
        assert SMALL_BLOCK % config.rows == 0


@pytest.mark.parametrize("cut", tensor_cores.CUTS)
def test_a_block_that_shrinks_has_whole_ranks_and_no_other_slices(cut: tensor_cores.Cut) -> None:
    digits = tensor_cores.GROUP * cut.shrink.tiles
    assert layout.PLACES % digits == 0
    assert digits // tensor_cores.MOST_PARTS % max(layout.DIGITS.values()) == 0


def test_the_order_of_summation_follows_from_the_layer() -> None:
    assert [tensor_cores.parts_for(inputs) for inputs in (16, 3584, 4096, 11008, 14336, 18944)] == [
        1, 1, 1, 2, 2, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", tensor_cores.DTYPES)
def test_the_kernel_compiles_without_a_gpu(dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings", reason="brings the compiler")
    for config in {config for cut in tensor_cores.CUTS for config in (cut.shrink, cut.expand)}:
        file, options = f"{config.kernel}.cu", config.options(dtype)
        assert nvrtc.compiled(svd_delta.__name__, file, tensor_cores.ARCHITECTURE, options)


def test_the_unused_part_of_a_line_is_zero() -> None:
    """The kernels multiply it, by zeros."""
    random = torch.Generator().manual_seed(0)
    group = check._group(2, 5, 300, 200, random)
    parts = layout.parts(300, (200,), ({2: 5},))
    arena = torch.full((total_bytes(parts),), 0xFF, dtype=torch.uint8)
    stored = views(arena, parts, 0)
    layout.pack([[group]], stored)
    for side, columns in (("v0", 300), ("u0", 200)):
        unused = layout.coded(stored[side], 5, columns).unused
        assert [each.shape[1] for each in unused] == [layout.LINE - 5] * 2
        assert not any(bool(each.any()) for each in unused)


def test_the_check_s_deltas_equal_the_reference() -> None:
    """The check compares with the reference; here that is compared with dense products in float64."""
    inputs, slots = 300, [0, 2, 1]
    random = torch.Generator().manual_seed(0)
    arena, table = check.loaded(inputs, random)
    random = torch.Generator().manual_seed(0)
    deltas = [
        [
            [check._group(bits, rank, inputs, outputs, random) for bits, rank in by_bits.items()]
            for by_bits, outputs in zip(ranks, check.SLICES, strict=True)
        ]
        for ranks in check.RANKS
    ]
    x, out = torch.randn(3, inputs), torch.zeros(3, sum(check.SLICES))
    rows = Rows(3, 3, CPU)
    rows.update(np.array(slots, np.int32))
    reference.apply(x, out, arena, table, rows, check.SLICES)
    for row, slot in enumerate(slots):
        parts = [
            sum(
                (x[row].double() @ weights(each.v).T @ weights(each.u) for each in groups),
                start=torch.zeros(outputs, dtype=torch.float64),
            )
            for groups, outputs in zip(deltas[slot], check.SLICES, strict=True)
        ]
        torch.testing.assert_close(out[row].double(), torch.cat(parts), rtol=0, atol=2e-5)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Instead of the kernels, the reference, which both launches hand over to."""
    kept: list[torch.Tensor] = []

    def shrink(x: torch.Tensor, *others: Any) -> None:
        kept[:] = [x]

    def expand(
        out: torch.Tensor,
        arena: torch.Tensor,
        table: torch.Tensor,
        tiles: Tiles,
        slices: Sequence[int],
        *others: Any,
    ) -> None:
        slots = np.full(len(out), -1, np.int32)
        for slot, first, count in tiles.tiles.tolist():
            if slot >= 0:
                slots[tiles.order[first : first + count].numpy()] = slot
        rows = Rows(len(out), len(table), CPU)
        rows.update(slots)
        reference.apply(kept[0], out, arena, table, rows, tuple(slices))

    monkeypatch.setattr(tensor_cores, "shrink", shrink)
    monkeypatch.setattr(tensor_cores, "expand", expand)
    return monkeypatch


@pytest.mark.parametrize("dtype", tensor_cores.DTYPES)
def test_a_correct_kernel_passes_the_check(on_host: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert check.problem(dtype, CPU) is None


def test_a_wrong_kernel_fails_the_check(on_host: pytest.MonkeyPatch) -> None:
    right = tensor_cores.expand

    def not_a_number(out: torch.Tensor, *others: Any) -> None:
        right(out, *others)
        out[-1, 0] = torch.nan

    def not_added(out: torch.Tensor, *others: Any) -> None:
        right(out.clone(), *others)

    def does_not_compile(*given: Any) -> None:
        raise RuntimeError("expand.cu could not be compiled")

    for wrong, says in (
        (not_a_number, "differ by"),
        (not_added, "differ by"),
        (does_not_compile, "could not be compiled"),
    ):
        on_host.setattr(tensor_cores, "expand", wrong)
        assert says in (check.problem(torch.bfloat16, CPU) or "")


class OnGpu:
    """A plan's part of a tensor in that memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device("cuda"), dtype


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that says it has one, on which the kernels pass."""
    monkeypatch.delenv(check.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(check, "problem", lambda dtype, device: None)
    check.chosen.cache_clear()
    yield monkeypatch
    check.chosen.cache_clear()


def plan_of(
    num_rows: int, block: int = SMALL_BLOCK, dtype: torch.dtype = torch.bfloat16, max_rank: int = 16
) -> Plan | tensor_cores.Cut:
    none = torch.empty(0, dtype=torch.int32)
    x: Any = OnGpu(dtype)
    return svd_delta.plan_for(Tiles(num_rows, block, 1, none, none), x, Scratch(1, max_rank, CPU))


def test_kernels_that_passed_serve_batches_that_are_decoded(hopper: pytest.MonkeyPatch) -> None:
    assert plan_of(1) == plan_of(4) == tensor_cores.FEW
    assert plan_of(5) == plan_of(32) == tensor_cores.MANY
    assert plan_of(33) == plan_of(64) == tensor_cores.MORE
    assert isinstance(plan_of(65), Plan)
    assert isinstance(plan_of(512, LARGE_BLOCK), Plan)
    assert isinstance(plan_of(8, dtype=torch.float32), Plan)


def test_slices_of_more_digits_than_there_is_room_for_are_expanded_without_keeping_inner_products(
    hopper: pytest.MonkeyPatch,
) -> None:
    room = tensor_cores.MANY.expand
    assert isinstance(room, tensor_cores.ExpandMany)
    fits = (room.most_digits - SPARE_PLACES) // layout.PLACES * layout.PLACES
    assert plan_of(8, max_rank=fits) == tensor_cores.MANY
    assert plan_of(8, max_rank=fits + 1) == tensor_cores.MORE
    assert plan_of(4, max_rank=fits + 1) == tensor_cores.FEW


def test_there_is_room_for_all_inner_products_of_a_row() -> None:
    """The kernel's layout: even 16s of digits, and 32 bytes so that rows lie in different banks."""
    for inner_bytes in (159, 160, 287, 288, 51200):
        room = tensor_cores.ExpandMany(8, 3, 2, 2, inner_bytes)

        def taken(digits: int) -> int:
            groups = -(-digits // tensor_cores.GROUP)
            return 64 * (groups + groups % 2) + 32

        assert taken(room.most_digits) <= inner_bytes < taken(room.most_digits + 1)


def test_kernels_that_sum_alike_serve_all_batches_that_are_decoded_in_the_invariant_mode(
    hopper: pytest.MonkeyPatch,
) -> None:
    hopper.setattr(svd_delta, "batch_invariant", lambda: True)
    assert plan_of(511) == tensor_cores.MORE
    assert isinstance(plan_of(512, LARGE_BLOCK), Plan)


def test_triton_serves_where_they_do_not_pass(
    hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper.setattr(check, "problem", lambda dtype, device: "results differ by 7")
    assert isinstance(plan_of(8), Plan)
    assert "results differ by 7" in caplog.text


def test_other_gpus_and_a_disabled_setting_do_not_use_them(hopper: pytest.MonkeyPatch) -> None:
    hopper.setenv(check.SWITCH, "0")
    assert isinstance(plan_of(8), Plan)
    check.chosen.cache_clear()
    hopper.delenv(check.SWITCH)
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert isinstance(plan_of(8), Plan)
