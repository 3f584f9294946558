"""CpuLora against dense products in float64: any slot per row, base rows, empty slots, several slices."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # noqa: E402

from workers.cpu_lora import BASE, CpuLora, rows_by_slot  # noqa: E402

pytestmark = pytest.mark.slow  # importing vLLM takes long

SLOTS, RANK, INPUT = 4, 8, 24
SLICES = (32, 8, 16)
SCALE = 0.5


def _wrapper(cls: type, slots: list[int]) -> Any:
    """A wrapper whose batch has one token per entry of `slots`."""
    wrapper = cls(256, 64, "cpu")
    wrapper._token_lora_indices[: len(slots)] = torch.tensor(slots)
    wrapper.indices_len[0] = len(slots)
    wrapper.is_prefill = False
    return wrapper


def _weights(seed: int, empty: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """A and B stacks as vLLM keeps them, ranks below RANK padded with zeros, `empty` slots all zero."""
    torch.manual_seed(seed)
    a = [torch.randn(SLOTS, 1, RANK, INPUT) for _ in SLICES]
    b = [torch.randn(SLOTS, 1, width, RANK) for width in SLICES]
    for slot in range(SLOTS):
        used = RANK // 2 if slot % 2 else RANK
        for stack_a, stack_b in zip(a, b, strict=True):
            stack_a[slot, :, used:] = 0
            stack_b[slot, :, :, used:] = 0
            if slot in empty:
                stack_a[slot] = stack_b[slot] = 0
    return a, b


def _dense(y: Any, x: Any, a: list[Any], b: list[Any], slots: list[int]) -> Any:
    """The same in float64, row by row."""
    result = y.double().clone()
    for row, slot in enumerate(slots):
        if slot == BASE:
            continue
        updates = [
            SCALE * (b[i][slot, 0].double() @ (a[i][slot, 0].double() @ x[row].double()))
            for i in range(len(SLICES))
        ]
        result[row] += torch.cat(updates)
    return result


def _add(cls: type, slots: list[int], seed: int, empty: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
    """(what the wrapper makes of y, what it should be, y before)."""
    a, b = _weights(seed, empty)
    x, y = torch.randn(len(slots), INPUT), torch.randn(len(slots), sum(SLICES))
    before, expected = y.clone(), _dense(y, x, a, b, slots)
    _wrapper(cls, slots).add_lora_linear(y, x, tuple(a), tuple(b), SCALE, SLICES)
    return y.double(), expected, before


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_equal_dense_products(seed: int) -> None:
    torch.manual_seed(100 + seed)
    slots = torch.randint(BASE, SLOTS, (int(torch.randint(1, 40, ())),)).tolist()
    got, expected, before = _add(CpuLora, slots, seed, empty=(1,) if seed % 2 else ())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    base_rows = [row for row, slot in enumerate(slots) if slot == BASE]
    assert torch.equal(got[base_rows], before.double()[base_rows])


@pytest.mark.parametrize("slots", [[BASE], [BASE] * 5, [3] * 5, [0], [BASE, 3, BASE], [3, 2, 1, 0, BASE]])
def test_batches_of_one_kind_and_of_all(slots: list[int]) -> None:
    got, expected, _ = _add(CpuLora, slots, 7)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_a_dirty_buffer_does_not_reach_base_rows() -> None:
    """vLLM may hand in a buffer it used before."""
    slots = [BASE, 2, BASE]
    a, b = _weights(3, ())
    x, y = torch.randn(3, INPUT), torch.zeros(3, sum(SLICES))
    dirty = tuple(torch.full((3, RANK), 9.0) for _ in SLICES)
    expected = _dense(y, x, a, b, slots)
    _wrapper(CpuLora, slots).add_lora_linear(y, x, tuple(a), tuple(b), SCALE, SLICES, buffer=dirty)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    slots = [0, BASE, 3, 3]
    a, b = ([w.bfloat16() for w in stack] for stack in _weights(5, ()))
    x, y = torch.randn(4, INPUT).bfloat16(), torch.randn(4, sum(SLICES))
    expected = _dense(y, x, a, b, slots)
    _wrapper(CpuLora, slots).add_lora_linear(y, x, tuple(a), tuple(b), SCALE, SLICES)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_expand_without_adding_writes_only_its_slice() -> None:
    slots, (_, b) = [1, BASE, 2], _weights(6, ())
    x, y = torch.randn(3, RANK), torch.ones(3, sum(SLICES))
    wrapper = _wrapper(CpuLora, slots)
    wrapper._apply_expand(y, x, b[1], SLICES[0], SLICES[1], add_inputs=False)
    columns = slice(SLICES[0], SLICES[0] + SLICES[1])
    for row, slot in ((0, 1), (2, 2)):
        torch.testing.assert_close(y[row, columns], b[1][slot, 0] @ x[row])
    assert torch.equal(y[1], torch.ones(sum(SLICES)))
    assert torch.equal(y[:, : SLICES[0]], torch.ones(3, SLICES[0]))


def test_rows_by_slot_names_each_row_once() -> None:
    found = {slot: rows.tolist() for slot, rows in rows_by_slot(torch.tensor([2, -1, 0, 2, -1]))}
    assert found == {0: [2], 2: [0, 3]}


def test_vllm_s_own_arithmetic_is_still_wrong_for_base_rows() -> None:
    """The reason for CpuLora. When this fails, upstream has mended it and CpuLora may go."""
    slots = [BASE, 0, BASE]
    got, expected, _ = _add(PunicaWrapperCPU, slots, 1)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-4)
    assert (got[[0, 2]] - expected[[0, 2]]).abs().max() > 0.1


def test_the_plug_in_puts_it_in_place() -> None:
    from vllm.platforms import current_platform

    from workers.plugin import register

    if not current_platform.is_cpu():
        pytest.skip("only CPUs use it")
    register()
    assert current_platform.get_punica_wrapper() == "workers.cpu_lora.CpuLora"
