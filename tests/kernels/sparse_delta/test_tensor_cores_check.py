"""Whether this process may multiply on sparse tensor cores, with torch in the place of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from workers.kernels import sparse_delta
from workers.kernels.sparse_delta import merged_rows, merging, reference, tensor_cores
from workers.kernels.sparse_delta import tensor_cores_check as check

Apply = Callable[..., None]
merge = merging.merge
multiply: Apply = merged_rows.apply
CPU = torch.device("cpu")


def right(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
    reference.apply(x, out, *others[:-1])


def not_a_number(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
    right(x, out, *others)
    out[-1, 0] = torch.nan


def a_square_lost(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
    right(x.clone().index_fill_(1, torch.arange(64), 0), out, *others)


def not_added(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
    right(x, out.zero_(), *others)


def merged_twice(into: torch.Tensor, layer: merging.Layer, slot: int, first: int) -> None:
    merge(into, layer, slot, first)
    once = into.clone()
    merge(into, replace(layer, base=into.new_zeros(layer.base.shape)), slot, first)
    into.add_(once)


def does_not_compile(*given: Any) -> None:
    raise RuntimeError("sbmm.cu could not be compiled")


@pytest.mark.parametrize("dtype", tensor_cores.DTYPES)
def test_a_correct_kernel_passes_the_check(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(tensor_cores, "apply", right)
    assert check.problem(dtype, CPU) is None


@pytest.mark.parametrize(
    ("apply", "says"),
    [
        (not_a_number, "differ by"),
        (a_square_lost, "differ by"),
        (not_added, "differ by"),
        (does_not_compile, "could not be compiled"),
    ],
)
def test_a_wrong_kernel_fails_the_check(monkeypatch: pytest.MonkeyPatch, apply: Apply, says: str) -> None:
    monkeypatch.setattr(tensor_cores, "apply", apply)
    assert says in (check.problem(torch.bfloat16, CPU) or "")


def test_the_check_finds_wrongly_merged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cores, "apply", right)
    monkeypatch.setattr(merging, "merge", merged_twice)
    assert "merged weights" in (check.problem(torch.bfloat16, CPU) or "")


def unused_rows_are_left(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
    *given, tiles = others
    multiply(x, out, *given, tiles if x.dtype == torch.float32 else tiles[:-1])


def delta_of_another_variant(x: torch.Tensor, out: torch.Tensor, *others: Any) -> None:
    *given, tiles = others
    swapped = tiles.clone()
    swapped[tiles[:, 0] == 2, 0] = 0
    multiply(x, out, *given, tiles if x.dtype == torch.float32 else swapped)


@pytest.mark.parametrize("apply", [unused_rows_are_left, delta_of_another_variant])
def test_the_check_finds_rows_with_wrong_weights(monkeypatch: pytest.MonkeyPatch, apply: Apply) -> None:
    monkeypatch.setattr(tensor_cores, "apply", right)
    monkeypatch.setattr(merged_rows, "apply", apply)
    assert "merged rows" in (check.problem(torch.bfloat16, CPU) or "")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that says it has one."""
    monkeypatch.delenv(check.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check.chosen.cache_clear()
    yield monkeypatch
    check.chosen.cache_clear()


def in_squares(slices: tuple[int, ...] = (64, 128), inputs: int = 128) -> bool:
    return sparse_delta.in_squares(inputs, slices, torch.bfloat16)


def test_a_kernel_that_passed_is_used_where_it_can_be(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(check, "problem", lambda dtype, device: None)
    assert in_squares()
    assert not in_squares(inputs=96)
    assert not in_squares(slices=(64, 96))
    assert not in_squares(slices=(64,) * 5)
    assert not sparse_delta.in_squares(128, (64,), torch.float32)


def test_triton_serves_where_the_kernel_does_not_pass(
    hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hopper.setattr(check, "problem", lambda dtype, device: "results differ by 7")
    assert not in_squares()
    assert "results differ by 7" in caplog.text


def test_other_gpus_and_a_disabled_setting_do_not_use_it(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(check, "problem", lambda dtype, device: None)
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert not in_squares()
    check.chosen.cache_clear()
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    hopper.setenv(check.SWITCH, "0")
    assert not in_squares()
