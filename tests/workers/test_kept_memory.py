"""The memory that an engine's processes keep after requests is bounded, whatever the requests were."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workers.vllm_environment import KEPT_MEMORY, environment

MOST_MIB = 64
GROWTH = """
from pathlib import Path
import torch
torch.set_num_threads(1)

def anonymous_kib():
    return sum(int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
               if line.startswith("Anonymous:"))
"""
# Products for 600 numbers of rows, as prompts of all lengths ask for them.
PRODUCTS = """
import vllm._C
from vllm import _custom_ops as ops
product = ops.create_onednn_mm(torch.randn(64, 96).t(), 32)

def ask(rows):
    ops.onednn_mm(product, torch.randn(rows, 96), None)

ask(700)
before = anonymous_kib()
for rows in range(1, 600):
    ask(rows)
print((anonymous_kib() - before) / 1024)
"""
# Logits of prompts of different lengths, and what their requests keep for a while.
LOGITS = """
import random
order, kept = random.Random(1), []
before = anonymous_kib()
for step in range(400):
    tensors = [torch.ones(order.randrange(1, 30) * 2**18) for _ in range(order.randrange(1, 4))]
    kept.append(bytearray(order.randrange(2**12, 2**16)))
    del tensors, kept[:-200]
print((anonymous_kib() - before) / 1024)
"""


@pytest.mark.parametrize("work", [PRODUCTS, LOGITS], ids=["products", "logits"])
def test_little_is_kept_of_requests_of_all_sizes(work: str) -> None:
    variables = {name: value for name, value in environment((2,)).items() if value is not None}
    made = subprocess.run(
        [sys.executable, "-c", GROWTH + work],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert float(made.stdout.splitlines()[-1]) < MOST_MIB


def test_a_user_can_set_other_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment((2,)).items() >= KEPT_MEMORY.items()
    for name in KEPT_MEMORY:
        monkeypatch.setenv(name, "7")
    assert all(environment((2,))[name] == "7" for name in KEPT_MEMORY)
