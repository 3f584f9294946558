"""The assembly that unpacks weights, executed word by word: no GPU is needed to know what it computes."""

from __future__ import annotations

from collections.abc import Callable
from operator import and_, lshift, rshift
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from workers.kernels.sparse_delta import kernel

HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
SIGN = 8  # of a selector of `prmt`: the byte's sign, eight times


def executed(ptx: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the few instructions that the assembly is made of."""
    registers = dict(inputs)

    def value(word: str) -> int:
        return registers[word] if word in registers else int(word, 0)

    for statement in ptx.strip("{}\n").split(";"):
        name, *words = statement.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            to, *sources = words
            registers[to] = _instruction(name, [value(word) for word in sources]) & 0xFFFFFFFF
    return registers


def _instruction(name: str, of: list[int]) -> int:
    operation, *_, kind = name.split(".")
    if operation in ("sub", "fma"):
        first, *others = (_halves(word, kind).double() for word in of)
        found = first - others[0] if operation == "sub" else first * others[0] + others[1]
        return _packed(found.to(HALVES[kind]))
    operations: dict[str, Callable[..., int]] = {
        "mov": _same,
        "and": and_,
        "shr": rshift,
        "shl": lshift,
        "lop3": _looked_up,
        "prmt": _permuted,
    }
    return operations[operation](*of)


def _same(word: int) -> int:
    return word


def _looked_up(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for i in range(32):
        index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
        found |= (table >> index & 1) << i
    return found


def _permuted(low: int, high: int, selector: int) -> int:
    both, found = low | high << 32, 0
    for i in range(4):
        chosen = selector >> 4 * i & 15
        byte = both >> 8 * (chosen % SIGN) & 255
        found |= (255 * (byte >> 7) if chosen >= SIGN else byte) << 8 * i
    return found


def _halves(word: int, kind: str) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.uint16).view(HALVES[kind])


def _packed(values: torch.Tensor) -> int:
    low, high = map(int, values.view(torch.uint16).tolist())
    return low | high << 16


def _weights(registers: dict[str, int], count: int, kind: str) -> np.ndarray:
    """[count, 4]: each position's values of four groups."""
    values = [_halves(registers[f"${i}"], kind) for i in range(2 * count)]
    return torch.stack(values).float().view(count, 4).numpy()


@pytest.mark.parametrize(
    ("ptx", "kind", "excess"),
    [
        (kernel.TWO_BITS_EXCESS, "bf16x2", [130, 34, 10, 10]),
        (kernel.TWO_BITS_BF16, "bf16x2", [0] * 4),
        (kernel.TWO_BITS_FP16, "f16x2", [0] * 4),
    ],
)
def test_two_bits_are_decoded(ptx: Any, kind: str, excess: list[int]) -> None:
    for word in np.random.default_rng(0).integers(0, 1 << 32, 64).tolist():
        found = _weights(executed(ptx.value, {"$8": word}), 4, kind)
        codes = [[(word >> 8 * group + 2 * j & 3) - 2 for group in range(4)] for j in range(4)]
        assert np.array_equal(found, np.array(codes) + np.array(excess)[:, None])
    assert [kernel._excess.fn(j, 2) for j in range(4)] == [130, 34, 10, 10]


@pytest.mark.parametrize(
    ("ptx", "kind", "excess"),
    [
        (kernel.FOUR_BITS_EXCESS, "bf16x2", 136),
        (kernel.FOUR_BITS_BF16, "bf16x2", 0),
        (kernel.FOUR_BITS_FP16, "f16x2", 0),
    ],
)
def test_four_bits_are_decoded(ptx: Any, kind: str, excess: int) -> None:
    random = np.random.default_rng(1)
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for _ in range(32):
        kept = [[pairs[index] for index in random.integers(0, 6, 4)] for _ in range(2)]  # [rows, groups]
        codes = random.integers(0, 16, (2, 4, 2))
        want = np.full((2, 4, 4), excess)  # rows, positions, groups
        masks, words = 0, [0, 0]
        for row in range(2):
            for group in range(4):
                words[row] |= int(codes[row, group, 0] | codes[row, group, 1] << 4) << 8 * group
                for code, column in zip(codes[row, group], kept[row][group], strict=True):
                    masks |= 1 << 8 * group + 4 * row + column
                    want[row, column, group] += code - 8
        found = _weights(executed(ptx.value, {"$16": words[0], "$17": words[1], "$18": masks}), 8, kind)
        assert np.array_equal(found, want.reshape(8, 4))


@pytest.mark.parametrize("bits", [2, 4])
def test_constants_are_the_excess(bits: int) -> None:
    for j in range(4):
        registers = executed(kernel._constant_ptx.fn(j, bits), {})
        assert _halves(registers["$0"], "bf16x2").tolist() == [kernel._excess.fn(j, bits)] * 2
        assert registers["$1"] == registers["$0"]
