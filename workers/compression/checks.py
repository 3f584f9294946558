"""Whether a fine-tune can be compressed against a base, checked with figures before the work starts.

First the headers are compared (`check_alike`). Then one pass reads all values (`scan`). It finds values that
are not finite, the distance of the fine-tune from its base, and whether it differs at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from profiler.errors import AdapterError, CheckpointError
from profiler.files import read_json
from profiler.types import ModelSpec
from profiler.variants.sparse import group_problem
from profiler.variants.types import VariantKind
from workers.compression.choose import OptionError
from workers.compression.layout import added_rows, all_tensors, at_layer, linear_modules
from workers.compression.rope import rope_of
from workers.compression.sources import Source
from workers.compression.types import Method, Progress

SUSPICIOUS = 0.2
IMPLAUSIBLE = 0.5
"""|W - W_base| / |W_base| over the linear layers: fine-tunes lie below 0.1, unrelated models near 1.4."""

COMPUTING = (
    *("rms_norm_eps", "hidden_act", "hidden_activation", "sliding_window", "layer_types"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)
"""Keys of config.json that change what the same weights compute, in addition to RoPE's keys."""

CHUNK = 1 << 24  # values checked together: 64 MiB in float32


class ImplausibleBase(AdapterError):
    """The fine-tune is too far from the base to be its own. The caller adds how to insist."""


@dataclass(frozen=True)
class Scan:
    """The result of one pass over all values. The norms are of the linear layers' weights and their
    deltas.
    """

    base_norm: float
    delta_norm: float
    tensors: int
    differing: int

    @property
    def distance(self) -> float:
        """|W - W_base| / |W_base|."""
        return self.delta_norm / self.base_norm if self.base_norm else math.inf


def check_alike(base: Source, tuned: Source) -> list[str]:
    """Compare configs and headers alone; returns warnings.

    Raises AdapterError if the two have different architectures or shapes. The fine-tune's vocabulary may be
    larger.
    """
    a, b = base.spec, tuned.spec
    for what, left, right in (
        ("architecture", a.architecture, b.architecture),
        ("number of layers", a.num_layers, b.num_layers),
        ("shapes of a layer", a.layer_shapes, b.layer_shapes),
    ):
        if left != right:
            raise AdapterError(
                f"{tuned.origin} is not a fine-tune of {base.origin}: expected the {what} to be "
                f"{_difference(left, right)}; give the checkpoint that the fine-tune was trained from"
            )
    return [*_vocabulary(base, tuned), *_settings(base, tuned)]


def check_groups(spec: ModelSpec, method: Method) -> None:
    """Check that an engine can load the delta of every module.

    Raises OptionError if too many, or too few, columns share a scale.
    """
    size = method.facts.get("group_size")
    if method.kind is not VariantKind.SPARSE_DELTA or size is None:
        return
    for module in linear_modules(spec):
        inputs = spec.linears[module].into
        if problem := group_problem(inputs, size):
            raise OptionError(
                "group_size",
                f"{module} has {inputs} inputs, {problem}; or leave it out, so that each row has one scale",
            )


def scan(base: Source, tuned: Source, device: str, tell: Progress) -> Scan:
    """Read both once. Raises CheckpointError for a value that is not finite, with its tensor and place."""
    spec = base.spec
    names = tuple(dict.fromkeys((*all_tensors(spec), *all_tensors(tuned.spec))))
    linear = {
        f"{at_layer(spec, layer)}{module}.weight"
        for layer in range(spec.num_layers)
        for module in linear_modules(spec)
    }
    base_square = delta_square = 0.0
    differing = 0
    for number, name in enumerate(names):
        tell(number / len(names), f"checking {name}")
        before, after = (source.tensor(name).to(device) for source in (base, tuned))
        for source, tensor in ((base, before), (tuned, after)):
            _check_finite(source, name, tensor)
        old_square, change_square = _squares(before, after)
        differing += change_square > 0 or after.shape != before.shape
        if name in linear:
            base_square, delta_square = base_square + old_square, delta_square + change_square
    return Scan(math.sqrt(base_square), math.sqrt(delta_square), len(names), differing)


def judge(found: Scan, base: Source, tuned: Source, force: bool) -> list[str]:
    """Judge the result of a scan; returns warnings.

    Raises AdapterError if nothing differs, and, unless `force`, ImplausibleBase if the fine-tune cannot come
    from this base.
    """
    if not found.differing:
        raise AdapterError(
            f"all {found.tensors} tensors of {tuned.origin} equal those of {base.origin}: this is the base "
            "itself; give the folder of the fine-tune"
        )
    if found.distance <= SUSPICIOUS:
        return []
    figures = (
        f"the linear layers of {tuned.origin} differ from those of {base.origin} by {found.distance:.2f} of "
        f"their norm ({found.delta_norm:.4g} of {found.base_norm:.4g}), where fine-tunes differ by less "
        "than 0.1 and unrelated models by about 1.4"
    )
    if found.distance <= IMPLAUSIBLE or force:
        return [f"{figures}; check that the fine-tune was trained from this base"]
    raise ImplausibleBase(
        f"{figures} (allowed: {IMPLAUSIBLE}); give the checkpoint that the fine-tune was trained from"
    )


def _vocabulary(base: Source, tuned: Source) -> list[str]:
    added = added_rows(base.spec, tuned.spec)
    size = base.spec.vocab_size
    if added < 0:
        raise AdapterError(
            f"{tuned.origin} is not a fine-tune of {base.origin}: expected at least the base's {size} "
            f"tokens, got {size + added}; give the checkpoint that the fine-tune was trained from"
        )
    if not added:
        return []
    return [
        f"the vocabulary grew from {size} to {size + added} tokens. Engines have the base's vocabulary, so "
        f"requests cannot use tokens {size} to {size + added - 1}. Their rows are stored, and `ostinato "
        "merge` restores them"
    ]


def _settings(base: Source, tuned: Source) -> list[str]:
    """Warnings about settings that differ: engines compute a variant by its base's config."""
    before, after = (_computing(read_json(source.folder / "config.json")) for source in (base, tuned))
    return [
        f"config.json has {key} {after[key]}, but the base has {before[key]}. Engines use the base's value, "
        "so answers will differ from the fine-tune's"
        for key in before
        if key in after and before[key] != after[key]
    ]


def _computing(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that change the meaning of the same weights.

    If config.json omits a number, its family's default applies, which is not known here.
    """
    rope = rope_of(config)
    said = {key: config[key] for key in COMPUTING if key in config}
    if config.get("use_sliding_window") is False:
        said["sliding_window"] = None
    return {"rope_theta": rope.pop("rope_theta", None), "rope_scaling": rope or None, **said}


def _difference(left: Any, right: Any) -> str:
    """Both values; for two tables, only the entries that differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
        left, right = ({key: side.get(key) for key in keys} for side in (left, right))
    return f"{left}, got {right}"


def _squares(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """|before|^2 and |after - before|^2, over the rows that both have."""
    after = after[: before.shape[0]]
    old = change = 0.0
    for a, b in zip(_chunks(before), _chunks(after), strict=True):
        old += _square(a.float())
        change += _square(b.float() - a.float())
    return old, change


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _check_finite(source: Source, name: str, tensor: torch.Tensor) -> None:
    start = 0
    for chunk in _chunks(tensor):
        bad = ~chunk.isfinite()
        if bool(bad.any()):
            at = start + int(bad.to(torch.uint8).argmax())
            place = [int(i) for i in torch.unravel_index(torch.tensor(at), tensor.shape)]
            raise CheckpointError(
                f"{name} in {source.origin} holds {float(tensor.flatten()[at])} at {place}: expected finite "
                "values; copy the file again, or train the model again"
            )
        start += chunk.numel()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(tensor.flatten().split(CHUNK))
