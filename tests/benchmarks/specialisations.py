"""Prints what an engine's kernels would be compiled for while requests run, as JSON: there should be nothing.

Run by test_warming, in a process of its own: in that of the tests, kernels are interpreted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.kernels.compiling import CPU, META, Launch, _recorded
from workers.kernels.rows import Rows
from workers.variant_config import VariantConfig
from workers.variants import operators, warming
from workers.variants.layer_context import Workspace
from workers.variants.shapes import LayerShape, LinearShape, NormShape, Slice, VocabularyShape

SLOTS, HIDDEN, WIDE, VOCABULARY = 8, 4096, 11008, 32000
# Some of these have numbers of tiles that are multiples of 16, or 1, which Triton would compile again.
COUNTS = [*range(1, 70), 128, 129, 140, 256, 300, 400, 511, 512, 513, 550, 1000, 1024, 1060, 2048]


def linear(inputs: int, *widths: int) -> LinearShape:
    return LinearShape("l", tuple(Slice("s", 0, width, width) for width in widths), 0, inputs, inputs)


def layers(biased: bool) -> Iterator[tuple[Any, LayerShape]]:
    bias = torch.empty(3 * HIDDEN, dtype=torch.bfloat16, device=META) if biased else None
    yield SimpleNamespace(bias=bias), linear(HIDDEN, HIDDEN, HIDDEN, HIDDEN)
    for shape in (linear(HIDDEN, HIDDEN), linear(HIDDEN, WIDE, WIDE), linear(WIDE, HIDDEN)):
        yield SimpleNamespace(bias=None), shape
    yield from ((SimpleNamespace(), NormShape("n", HIDDEN, zero_centred)) for zero_centred in (False, True))
    module = SimpleNamespace(weight=torch.empty(VOCABULARY, HIDDEN, device=META))
    for head in (False, True):
        yield module, VocabularyShape("v", 0, VOCABULARY, VOCABULARY, HIDDEN, head, False)


def hooked(kinds: tuple[str, ...], tokens: int, biased: bool) -> list[warming.Hooked]:
    config = VariantConfig(SLOTS, 1 << 20, 0, 16, kinds=kinds)
    batch = SimpleNamespace(tokens=Rows(tokens, SLOTS, CPU), scored=Rows(tokens, SLOTS, CPU))
    space = Workspace(config, tokens, 3, META)
    arena = torch.empty(1 << 20, dtype=torch.uint8, device=META)

    def site(shape: LayerShape) -> Any:
        names = operators.operations_for(kinds) & set(operators.operations_of(shape))
        tables = {
            op: torch.empty(SLOTS, operators.table_width(op, shape), dtype=torch.int64, device=META)
            for op in names
        }
        return SimpleNamespace(
            batch=batch, arena=arena, tables=tables, workspace=space, layout=contextlib.nullcontext()
        )

    return [(module, shape, site(shape)) for module, shape in layers(biased)]


def missing(kinds: tuple[str, ...], biased: bool) -> list[str]:
    """The kernels that row counts of all kinds need beyond the warm-up."""
    warm: dict[Launch, None] = {}
    later: dict[Launch, None] = {}
    made = hooked(kinds, 2048, biased)
    with _recorded("warm", warm):
        warming.warm_up(made, torch.bfloat16)
    with _recorded("warm", later):
        for (module, shape, site), count in itertools.product(made, COUNTS):
            if count <= site.batch.tokens.max_rows:
                warming._run(module, shape, site, count, torch.bfloat16)
    assert warm
    return [f"{kinds} {biased}: {launch.name} {launch.constants}" for launch in later.keys() - warm.keys()]


if __name__ == "__main__":
    kinds = operators._OF_KIND
    found = [line for kind in kinds for biased in (False, True) for line in missing((kind,), biased)]
    json.dump(found, sys.stdout)
