"""Batches hold every row once, and sums over them leave out what rows were filled up with."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.compression.calibration import batches
from workers.compression.calibration.batches import add_gram, batches_of

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=20)


@given(LENGTHS)
def test_batches_hold_every_token_once_within_their_bound(lengths: list[int]) -> None:
    rows = [torch.full((n,), number) for number, n in enumerate(lengths)]
    made = batches_of(rows, "cpu")
    counts = [0] * len(rows)
    for batch in made:
        real = batch.real(batch.ids[..., None])[:, 0]
        assert len(real) == batch.tokens
        for number in real.tolist():
            counts[number] += 1
        assert batch.ids.numel() <= max(batches.MAX_BATCH_TOKENS["cpu"], batch.ids.shape[1])
    assert counts == lengths


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_gram_is_that_of_the_rows_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    table = torch.randn(50, 4, generator=generator)
    rows = [torch.randint(0, 50, (n,), generator=generator) for n in lengths]
    expected = sum(
        (table[i].double().outer(table[i].double()) for row in rows for i in row), torch.zeros(4, 4)
    )
    gram = torch.zeros(4, 4)
    for batch in batches_of(rows, "cpu"):
        add_gram(gram, batch.real(table[batch.ids]), sum(lengths))
    torch.testing.assert_close(gram, (expected / sum(lengths)).float(), rtol=1e-5, atol=1e-5)
