"""DeltaZip's servers, and how its two ways of serving 32 full fine-tunes are put into the simulator.

`a800`: the paper's, Llama-2-13B on four A800 (A100s of 80 GB), step times by the roofline of their data
sheet.
`h200`: Llama-2-7B on one H200, step times measured (`benchmarks.routing.scenarios.H200` says where).

Deltas: one engine with the base in all steps; each delta among the rows adds the reading of its bytes, at
half of the memory's speed (measured on an H200, kernels_sparse_delta.json), and to its prompts as much again
as the base takes.

Whole models (the paper's vLLM-SCB): the slots hold whole models, as many as fit; nobody asks a base, and the
step itself takes nothing; each model among the decoding rows adds a whole step of one row of its own, for the
engine loops through them; a step that fills prompts reads one model more. Its batches, its line and what may
skip it are the same code's.

Both load one variant after the other beside the running steps. `disk`: each from the paper's storage (50
Gbit/s), as it says its baseline does; `host`: from the host's memory, where all of them lie.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.routing.scenarios import H200
from controlplane.simulation import figures
from controlplane.simulation.forms import EstimateForm, GroupsForm, StepsForm

VARIANTS = 32
BATCHED_TOKENS, MAX_ROWS = 2048, 256
LEAST_KV_TOKENS = 16_384  # what whole models leave room for
DELTA_MEMORY_SHARE = 0.5  # of the memory's speed
MEMORY_SHARE = 0.9  # of a GPU that an engine takes
DISK_GB_PER_S = 50 / 8
MIB, GB, MS, US = 2**20, 1e9, 1e-3, 1e-6
CONFIG_13B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Testbed:
    """Seconds and bytes of one engine. A decode step of n rows of the base takes `base_s` + n `row_s`, and
    `cached_s` for each cached token; one that fills n prompt tokens at least `prompt_s` + n `token_s`."""

    name: str
    gpus: int
    memory_bytes: float
    model_bytes: float
    delta_bytes: float
    cached_bytes: float
    base_s: float
    row_s: float
    cached_s: float
    prompt_s: float
    token_s: float
    read_bytes_per_s: float
    host_gb_per_s: float

    def kv_tokens(self, held_bytes: float) -> int:
        return int((MEMORY_SHARE * self.memory_bytes - held_bytes) / self.cached_bytes)

    @property
    def most_whole_models(self) -> int:
        room = MEMORY_SHARE * self.memory_bytes - LEAST_KV_TOKENS * self.cached_bytes
        return int(room / self.model_bytes)


@functools.cache
def a800() -> Testbed:
    """Deltas are 5.91 times smaller (Table 1, Llama 13B, 4 bits)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG_13B))
        form = EstimateForm(config=Path("config.json"), gpu="A100-80GB", tensor_parallel=4)
        model: Any = figures.model_of(
            GroupsForm(count=1, estimate=form, kv_tokens=100_000, batched_tokens=BATCHED_TOKENS), Path(folder)
        )[0]
    decode_s, prefill_s, grain = model["decode_s"], model["prefill_s"], float(model["prefill_grain"])
    row_s = float(decode_s[64] - decode_s[1]) / 63
    token_s = float(prefill_s[-1] - prefill_s[512]) / (512 * grain)
    return Testbed(
        name="a800",
        gpus=4,
        memory_bytes=4 * 80e9,
        model_bytes=26.0e9,
        delta_bytes=26.0e9 / 5.91,
        cached_bytes=40 * 2 * 5120 * 2,
        base_s=float(decode_s[1]) - row_s,
        row_s=row_s,
        cached_s=float(model["context_s"]),
        prompt_s=max(0.0, float(prefill_s[-1]) - BATCHED_TOKENS * token_s),
        token_s=token_s,
        read_bytes_per_s=4 * 2039e9,
        host_gb_per_s=4 * 20.0,
    )


@functools.cache
def h200() -> Testbed:
    rows, steps = H200.rows, H200.step_s
    row_s = (steps[2] - steps[0]) / (rows[2] - rows[0])
    return Testbed(
        name="h200",
        gpus=1,
        memory_bytes=141e9,
        model_bytes=13.5e9,
        delta_bytes=3.0e9,
        cached_bytes=0.5 * MIB,
        base_s=steps[0] - row_s,
        row_s=row_s,
        cached_s=H200.context_s,
        prompt_s=0.0,
        token_s=H200.prompt_token_s,
        read_bytes_per_s=H200.memory_bytes_per_s / DELTA_MEMORY_SHARE,
        host_gb_per_s=H200.load_bytes_per_s / GB,
    )


@dataclass(frozen=True)
class System:
    """`slots` variants are on the GPUs, and run at once."""

    name: str
    whole: bool
    slots: int
    from_disk: bool


def systems(testbed: Testbed, from_disk: bool) -> list[System]:
    """The paper shows two numbers of deltas at once, which its text does not tell: 8 and 16 here."""
    whole = System("whole models", True, testbed.most_whole_models, from_disk)
    return [whole, *(System(f"deltas, {n} at once", False, n, from_disk) for n in (8, 16))]


def groups_of(testbed: Testbed, system: System) -> GroupsForm:
    held = system.slots * (testbed.model_bytes if system.whole else testbed.delta_bytes)
    held += 0.0 if system.whole else testbed.model_bytes
    steps = StepsForm(
        base_ms=1e-6 if system.whole else testbed.base_s / MS,
        row_ms=testbed.row_s / MS,
        kv_token_us=testbed.cached_s / US,
        prompt_base_ms=max(testbed.prompt_s, testbed.base_s) / MS if system.whole else testbed.prompt_s / MS,
        prompt_token_ms=testbed.token_s / MS,
    )
    return GroupsForm(
        count=1,
        gpus=testbed.gpus,
        steps=steps,
        max_rows=MAX_ROWS,
        batched_tokens=BATCHED_TOKENS,
        kv_tokens=testbed.kv_tokens(held),
        slots=system.slots,
        load_gb_per_s=DISK_GB_PER_S if system.from_disk else testbed.host_gb_per_s,
    )


def variants_of(testbed: Testbed, system: System) -> dict[str, Any]:
    """As a scenario's file has them."""
    if system.whole:
        return {
            "kind": "sparse_delta",  # the simulator has no kind for whole models; none of its figures is used
            "count": VARIANTS,
            "mib": testbed.model_bytes / MIB,
            "variant_ms": testbed.base_s / MS,
        }
    return {
        "kind": "sparse_delta",
        "count": VARIANTS,
        "mib": testbed.delta_bytes / MIB,
        "variant_ms": testbed.delta_bytes / (DELTA_MEMORY_SHARE * testbed.read_bytes_per_s) / MS,
        "prompt_token_us": testbed.token_s / US,
    }
