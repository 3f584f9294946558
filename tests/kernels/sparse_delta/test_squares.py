"""Deltas in squares: what they mean, and that sparse tensor cores would multiply them as laid out.

No GPU runs here, so the instruction is followed by hand: `Warp` gives each lane's registers the meaning that
the PTX ISA gives them ("Matrix fragments for sparse mma.m16n8k32 with .bf16").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testkit.kernels.deltas import PAIRS, delta_of, dense, expected, load, random_delta
from workers.kernels import sparse_delta
from workers.kernels.rows import Rows
from workers.kernels.sparse_delta import Delta, Shape, square_packing, squares
from workers.kernels.types import total_bytes

SHAPES = st.builds(
    lambda strips, across, bits, whole: Shape(64 * strips, 64 * across, bits, 1 if whole else across, True),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from((4, 2)),
    st.booleans(),
)


def packed(delta: Delta) -> tuple[torch.Tensor, torch.Tensor]:
    shape = delta.shape
    cut = shape.outputs // 64, shape.inputs // 64
    into = torch.full((*cut, squares.square_bytes(shape.bits)), 0xFF, dtype=torch.uint8)
    scales = torch.full((shape.scales, shape.outputs), torch.nan, dtype=torch.float16)
    square_packing.pack(delta.values, delta.indices, delta.scales, shape.bits, into, scales)
    return into, scales


@given(SHAPES, st.integers(0, 99))
def test_the_packed_form_means_the_same(shape: Shape, seed: int) -> None:
    delta = random_delta(shape, np.random.default_rng(seed))
    into, scales = packed(delta)
    assert torch.equal(squares.unpack(into, scales, shape.bits).double(), dense(delta))
    rows = replace(shape, squares=False)
    assert total_bytes(sparse_delta.parts([shape])) == total_bytes(sparse_delta.parts([rows]))


@pytest.mark.parametrize("bits", [4, 2])
def test_a_matrix_that_begins_within_a_word_is_packed_the_same(bits: int) -> None:
    delta = random_delta(Shape(64, 128, bits, 1, True), np.random.default_rng(0))

    def shifted(matrix: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(matrix.numel() + 1, dtype=torch.uint8)
        return memory[1:].view(matrix.shape).copy_(matrix)

    moved = replace(delta, values=shifted(delta.values), indices=shifted(delta.indices))
    assert all(map(torch.equal, packed(moved), packed(delta)))


@dataclass(frozen=True)
class Warp:
    """A square's bytes as 32 lanes load them, of one delta of `bits`."""

    square: np.ndarray
    bits: int

    def words(self, array: int) -> np.ndarray:
        """uint32 [32 lanes, 4] of 16 bytes each: codes first, indices last."""
        return self.square[512 * array : 512 * (array + 1)].view("<u4").reshape(32, 4)

    def operand(self, tile: int, half: int) -> np.ndarray:
        """[32 lanes, 4 registers, 2 values]: the first operand's codes less what zero is."""
        if self.bits == 4:
            word = self.words(tile // 2)[:, tile % 2 * 2 + half]
            at = [[4 * r, 4 * r + 16] for r in range(4)]
        else:
            word = self.words(0)[:, tile]
            at = [[2 * (4 * half + r), 2 * (4 * half + r) + 16] for r in range(4)]
        codes = word[:, None, None] >> np.array(at, np.uint32) & ((1 << self.bits) - 1)
        return codes.astype(float) - (1 << (self.bits - 1))

    def metadata(self, tile: int) -> np.ndarray:
        return self.words(2 if self.bits == 4 else 1)[:, tile]

    def matrix(self, tile: int, half: int) -> np.ndarray:
        """[16, 32]: the sparse operand that mma.sp would multiply."""
        found, operand, metadata = np.zeros((16, 32)), self.operand(tile, half), self.metadata(tile)
        for lane in range(32):
            group, thread = lane // 4, lane % 4
            for register in range(4):
                row, four = group + 8 * (register % 2), thread + 4 * (register // 2)
                # The first of the pair of lanes that `half` selects has columns 0 to 15 of both rows.
                holder = metadata[4 * group + 2 * half + four // 4]
                pair = int(holder) >> (16 * (register % 2) + 4 * (four % 4)) & 15
                first, second = pair & 3, pair >> 2
                assert first < second, "ordered metadata"
                found[row, 4 * four + first] = operand[lane, register, 0]
                found[row, 4 * four + second] = operand[lane, register, 1]
        return found


@pytest.mark.parametrize("bits", [4, 2])
def test_tensor_cores_multiply_the_delta_s_weights(bits: int) -> None:
    delta = random_delta(Shape(128, 128, bits, squares=True), np.random.default_rng(bits))
    made, _ = packed(delta)
    codes = (dense(delta) / delta.scales.double()).round().numpy()
    for strip in range(2):
        for across in range(2):
            warp = Warp(made[strip, across].numpy(), bits)
            for tile in range(4):
                for half in range(2):
                    rows, columns = 64 * strip + 16 * tile, 64 * across + 32 * half
                    want = codes[rows : rows + 16, columns : columns + 32]
                    np.testing.assert_array_equal(warp.matrix(tile, half), want)


def test_scales_come_as_lanes_read_them() -> None:
    """Lane 4g + t has those of outputs 16m + 8h + g side by side."""
    random = np.random.default_rng(0)
    kept, codes = PAIRS[random.integers(0, 6, (128, 16))], random.integers(0, 16, (128, 16, 2), np.uint8)
    delta = delta_of(kept, codes, np.arange(128.0)[:, None], 4)
    by_lane = packed(delta)[1].view(2, 8, 4, 2)
    for strip, g, m, h in np.ndindex(*by_lane.shape):
        assert by_lane[strip, g, m, h] == 64 * strip + 16 * m + 8 * h + g


def test_a_batch_of_several_slots() -> None:
    """The product that the CPU runs reads squares, too."""
    random, slices = np.random.default_rng(0), (64, 192)
    slots: list[list[Delta | None]]
    slots = [[random_delta(Shape(w, 128, bits), random) for w in slices] for bits in (4, 2)]
    slots.append([None, slots[0][1]])
    arena, table = load(slots, squares=True)
    rows = Rows(6, 3, torch.device("cpu"))
    of_rows = np.array([2, 0, -1, 1, 0, 2], np.int32)
    rows.update(of_rows)
    x, before = torch.randn(6, 128), torch.randn(6, sum(slices))
    out = before.clone()
    sparse_delta.apply(x, out, arena, table, rows, slices)
    want = expected(x, before, slots, of_rows, slices)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_other_shapes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 64"):
        Shape(*shape, 4, squares=True)
