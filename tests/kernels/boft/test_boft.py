"""The rotation against explicit matrices and against PEFT's own layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testkit.kernels.rotations import cayley, expected, load, matrix, permutation, random_rotation
from workers.kernels import boft
from workers.kernels.boft import Rotation, Shape
from workers.kernels.boft.layout import positions
from workers.kernels.boft.reference import rotated
from workers.kernels.rows import Rows
from workers.kernels.types import total_bytes

CPU = torch.device("cpu")


def test_the_example_of_the_permutation() -> None:
    order = permutation(16, 4, 1).argmax(dim=1).tolist()
    assert order[:8] == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(("inputs", "block", "factor"), [(16, 4, 1), (64, 4, 3), (48, 6, 2), (32, 2, 2)])
def test_positions_are_the_permutations(inputs: int, block: int, factor: int) -> None:
    x = torch.arange(inputs, dtype=torch.float64)
    assert torch.equal(x[positions(inputs, block, factor)], x @ permutation(inputs, block, factor))


@pytest.mark.parametrize(
    ("inputs", "factors", "block"), [(8, 1, 8), (9, 1, 3), (64, 2, 32), (64, 4, 4), (48, 3, 4), (256, 1, 256)]
)
def test_rotating_is_multiplying_by_the_rotation(inputs: int, factors: int, block: int) -> None:
    rotation = random_rotation(inputs, 1, factors, block, torch.float32)
    x = torch.randn(3, inputs)
    torch.testing.assert_close(
        rotated(x, rotation.blocks).double(), x.double() @ matrix(rotation.blocks), rtol=0, atol=1e-5
    )


@pytest.mark.slow  # importing PEFT takes long
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_is_pefts(with_bias: bool) -> None:
    """PEFT uses one factor where its CUDA extension is missing, whatever was asked for."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = torch.nn.Linear(24, 10, bias=with_bias).double()
    config = peft.BOFTConfig(
        boft_block_size=4, boft_n_butterfly_factor=1, target_modules=["0"], init_weights=False
    )
    tuned = peft.get_peft_model(torch.nn.Sequential(base), config)
    layer = tuned.base_model.model[0].double()
    blocks = cayley(layer.boft_R["default"].detach()) - torch.eye(4, dtype=torch.float64)
    bias = base.bias.detach().float() if with_bias else None
    rotation = Rotation(blocks.float(), layer.boft_s["default"].detach().flatten().float(), bias)
    x = torch.randn(5, 24)
    got = _through(x, [rotation], np.zeros(5, np.int32), base)
    torch.testing.assert_close(got, layer(x.double()).detach(), rtol=1e-5, atol=1e-5)


def _through(
    x: torch.Tensor, rotations: list[Rotation | None], of_rows: np.ndarray, base: torch.nn.Linear
) -> torch.Tensor:
    arena, table = load([rotations], x.dtype)
    rows = Rows(16, 1, CPU)
    rows.update(of_rows)
    into = torch.empty(1, *x.shape)
    boft.rotate(x, into, arena, table, rows)
    out = base(into[0].double()).detach().float()
    bias = None if base.bias is None else base.bias.detach()
    boft.rescale(out, bias, arena, table, rows, (out.shape[1],))
    return torch.as_tensor(out.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_rotated_by_its_own_variant(dtype: torch.dtype) -> None:
    slots: list[list[Rotation | None]] = [
        [random_rotation(64, 8, 2, 8, dtype), None],
        [None, None],
        [random_rotation(64, 8, 1, 64, dtype), random_rotation(64, 6, 4, 4, dtype)],
    ]
    of_rows = np.array([2, -1, 0, 2, 1], np.int32)
    arena, table = load(slots, dtype)
    rows = Rows(16, 3, CPU)
    rows.update(of_rows)
    x = torch.randn(6, 64).to(dtype)  # one row of padding
    want = expected(x, slots, of_rows)
    for start, size in ((0, 64), (16, 24)):
        into = torch.full((2, 6, size), torch.nan, dtype=dtype)
        boft.rotate(x, into, arena, table, rows, start)
        window = slice(start, start + size)
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(into.double(), want[:, :, window], rtol=limit, atol=limit)
        assert torch.equal(into[:, [1, 4, 5]], x[[1, 4, 5], window].expand(2, 3, size))
        assert torch.equal(into[1, 2], x[2, window])


def test_bytes_are_the_blocks() -> None:
    shape = Shape(4096, 12288, 2, 32)
    assert total_bytes(boft.parts([shape], torch.bfloat16)) == pytest.approx(
        2 * 4096 * 32 * 2 + 4 * 12288, rel=0.02
    )


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the block size"):
        Shape(48, 8, 3, 8)
    with pytest.raises(ValueError, match="expected an even block size"):
        Shape(48, 8, 2, 3)
    with pytest.raises(ValueError, match=r"expected blocks \[factors"):
        _ = Rotation(torch.zeros(1, 2, 4, 3), torch.ones(4)).shape
    rows, bytes_ = Rows(4, 1, CPU), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="same type"):
        boft.rotate(torch.zeros(2, 8), torch.zeros(2, 8), bytes_, bytes_, rows)
    with pytest.raises(ValueError, match="within 0 to 8, got 4 to 12"):
        boft.rotate(torch.zeros(2, 8), torch.zeros(1, 2, 8), bytes_, bytes_, rows, 4)
    with pytest.raises(ValueError, match="got 2"):
        boft.rescale(torch.zeros(2, 8), None, bytes_, bytes_, rows, (8,))
