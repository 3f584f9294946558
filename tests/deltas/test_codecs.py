"""Coding matrices: what is stored decodes to what was meant, bit by bit and within the rounding's bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.deltas import boft, sparse, svd


def random(shape: tuple[int, ...], seed: int, scale: float = 1e-2) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- 2:4 sparse -------------------------------------------------------------------------------------------


def decode_by_hand(code: sparse.SparseCode, columns: int) -> np.ndarray:
    """The format's definition, one weight at a time."""
    values, indices, scales = (t.numpy() for t in (code.values, code.indices, code.scales))
    dense = np.zeros((values.shape[0], columns), np.float64)
    for row in range(dense.shape[0]):
        for group in range(columns // 4):
            nibble = int(indices[row, group // 2]) >> (4 * (group % 2)) & 15
            if code.bits == 4:
                pair = values[row, group] & 15, values[row, group] >> 4
            else:
                two = values[row, group // 2] >> (4 * (group % 2)) & 15
                pair = two & 3, two >> 2
            assert (nibble & 3) < (nibble >> 2)
            for value, index in zip(pair, (nibble & 3, nibble >> 2), strict=True):
                column = 4 * group + index
                scale = scales[row, column * scales.shape[1] // columns]
                dense[row, column] = (int(value) - 2 ** (code.bits - 1)) * np.float64(scale)
    return dense


@given(
    rows=st.integers(1, 5),
    eights=st.integers(1, 6),
    bits=st.sampled_from((4, 2)),
    grouped=st.booleans(),
    zero=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_a_sparse_code_follows_the_format(
    rows: int, eights: int, bits: int, grouped: bool, zero: float, seed: int
) -> None:
    matrix = random((rows, 8 * eights), seed)
    matrix *= random((rows, 8 * eights), seed + 1).abs() > zero * 0.02  # all-zero groups among them
    code = sparse.encode(matrix, bits, 8 if grouped else None)
    decoded = sparse.decode(code)
    assert np.array_equal(
        decoded.double().numpy().astype(np.float32), decode_by_hand(code, 8 * eights).astype(np.float32)
    )
    again = sparse.pack(*sparse.unpack(code), code.scales, bits)
    assert torch.equal(again.values, code.values)
    assert torch.equal(again.indices, code.indices)


@given(bits=st.sampled_from((4, 2)), seed=st.integers(0, 2**31), scale=st.sampled_from((1e-4, 1e-2, 30.0)))
def test_sparse_errors_are_bounded(bits: int, seed: int, scale: float) -> None:
    matrix = random((4, 32), seed, scale)
    code = sparse.encode(matrix, bits)
    decoded = sparse.decode(code)
    order = matrix.abs().view(4, -1, 4).argsort(dim=2, descending=True)
    kept = torch.zeros(4, 8, 4).scatter(2, order[:, :, :2], 1.0).view(4, 32).bool()
    assert bool((decoded[~kept] == 0).all())
    step = code.scales.float().expand(4, 32)
    limit = step * (2 ** (bits - 1) - 1 + 0.5)  # above it the largest code is clamped
    error = (decoded - matrix.clamp(max=limit))[kept].abs()
    assert bool((error <= step[kept] / 2 * 1.001).all())


def test_codes_survive_their_own_decoding() -> None:
    """Coding a decoded matrix again with its scales gives the same matrix, all-zero groups included."""
    matrix = random((6, 64), 3)
    matrix[:, 8:24] = 0
    matrix[2] = 0
    for bits in (4, 2):
        code = sparse.encode(matrix, bits)
        decoded = sparse.decode(code)
        assert bool((decoded[2] == 0).all())
        codes, positions = sparse.unpack(code)
        kept = decoded.view(6, 16, 4).gather(2, positions.view(6, 16, 2).long()).view(6, 32)
        assert torch.equal(
            sparse.codes_of(kept, code.scales, bits)[code.scales[:, 0] > 0], codes[code.scales[:, 0] > 0]
        )


@pytest.mark.parametrize(
    ("matrix", "bits", "group", "words"),
    [
        (torch.zeros(2, 12), 4, None, "multiple of 8"),
        (torch.zeros(2, 16), 3, None, "bits"),
        (torch.zeros(2, 16), 4, 12, "groups"),
        (torch.full((2, 16), torch.nan), 4, None, "finite"),
        (torch.full((2, 16), 1e6), 4, None, "finite"),
    ],
)
def test_a_matrix_without_a_sparse_code_is_refused(
    matrix: torch.Tensor, bits: int, group: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sparse.encode(matrix, bits, group)


# --- low rank ---------------------------------------------------------------------------------------------


@given(
    bits=st.sampled_from((8, 4, 3, 2)),
    rows=st.integers(1, 4),
    n=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_bit_streams_are_little_endian(bits: int, rows: int, n: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, n), dtype=np.uint8)
    stream = svd.pack_bits(torch.from_numpy(codes), bits)
    assert stream.shape == (rows, -(-n // 8) * bits)
    ones = np.unpackbits(stream.numpy(), axis=1, bitorder="little")
    for column in range(n):
        by_hand = sum(ones[:, column * bits + bit].astype(int) << bit for bit in range(bits))
        assert np.array_equal(by_hand, codes[:, column])
    assert np.array_equal(svd.unpack_bits(stream, bits, n).numpy(), codes)


@given(
    bits=st.sampled_from((16, 8, 4, 3, 2)),
    n=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    shift=st.floats(-2, 2),
)
def test_rows_are_within_a_step(bits: int, n: int, seed: int, shift: float) -> None:
    """Within half a step for the value, and another half because the zero is rounded too."""
    rows = random((3, n), seed) + shift * 1e-2
    code = svd.encode_rows(rows, bits)
    decoded = svd.decode_rows(code, bits, n)
    if code.scales is None:
        assert torch.equal(decoded, rows.half().float())
        return
    step = code.scales.float().repeat_interleave(svd.GROUP, dim=1)[:, :n]
    assert bool(((decoded - rows).abs() <= step * 1.01 + 1e-7).all())


def test_zeros_stay_zero_and_tiny_rows_are_no_nan() -> None:
    for bits in svd.BITS:
        assert bool((svd.decode_rows(svd.encode_rows(torch.zeros(2, 130), bits), bits, 130) == 0).all())
        assert bool(
            svd.decode_rows(svd.encode_rows(torch.full((2, 130), 1e-12), bits), bits, 130).isfinite().all()
        )


def test_a_matrix_of_low_rank_comes_back() -> None:
    matrix = random((48, 4), 1, 1.0) @ random((4, 200), 2, 1.0)
    for bits, error in ((16, 2e-3), (8, 2e-2)):
        decoded = svd.decode(svd.encode(matrix, [(bits, 2), (bits, 2)]), (48, 200))
        assert float((decoded - matrix).norm() / matrix.norm()) < error


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((4096, 4096), ((8, 2), (3, 32), (2, 968))),  # Delta-CoMe's
        ((576, 192), ((8, 2), (3, 32), (2, 16))),
        ((64, 32), ((8, 2), (3, 1), (2, 1))),
    ],
)
def test_the_default_budget_is_used(shape: tuple[int, int], groups: tuple[tuple[int, int], ...]) -> None:
    assert svd.default_groups(shape) == groups
    assert sum(bits * rank for bits, rank in groups) * sum(shape) <= shape[0] * shape[1]


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        svd.default_groups((8, 8), 1e-3)


# --- BOFT -------------------------------------------------------------------------------------------------


def test_the_butterfly_permutation_equals_peft_s() -> None:
    assert boft.permutation(16, 4, 1)[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert boft.permutation(16, 4, 0).tolist() == list(range(16))
    assert boft.permutation(16, 4, 2).tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


def dense_rotation(r: torch.Tensor) -> torch.Tensor:
    """PEFT's formulas, with the permutation as a matrix built as PEFT builds it."""
    factors, blocks, size, _ = r.shape
    n, whole = blocks * size, torch.eye(blocks * size, dtype=torch.float64)
    for factor in range(factors):
        run, half = size * 2**factor, max(1, size // 2)
        halves = [*range(0, run // half, 2), *range(1, run // half, 2)]
        order = [h * half + k for h in halves for k in range(half)] if factor else list(range(run))
        p = torch.zeros(n, n, dtype=torch.float64)
        for start in range(0, n, run):
            for position, source in enumerate(order):
                p[start + position, start + source] = 1
        skew = (r[factor].double() - r[factor].double().mT) / 2
        eye = torch.eye(size, dtype=torch.float64)
        q = [(eye - s) @ torch.linalg.inv(eye + s) for s in skew]
        whole = p @ torch.block_diag(*q) @ p.T @ whole
    return whole


@given(
    case=st.sampled_from(((1, 3, 4), (1, 1, 5), (2, 4, 4), (2, 2, 6), (3, 8, 2), (3, 4, 4))),
    seed=st.integers(0, 2**31),
)
def test_a_rotated_weight_equals_peft_s(case: tuple[int, int, int], seed: int) -> None:
    factors, blocks, size = case
    r, s = random((factors, blocks, size, size), seed, 1.0), 1 + random((7, 1), seed, 0.1)
    weight = random((7, blocks * size), seed + 1, 1.0)
    rotation = dense_rotation(r)
    assert torch.allclose(rotation @ rotation.T, torch.eye(blocks * size, dtype=torch.float64), atol=1e-9)
    expected = s.double() * (weight.double() @ rotation.T)
    assert torch.allclose(boft.rotate_weight(weight, r, s), expected, atol=1e-10)
