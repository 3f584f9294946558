"""Which fine-tune is compressed next, where, and with how much memory. Pure.

One fine-tune at a time is compressed on a node. If several wait for the same devices, one of each tenant goes
before a second of any tenant, the oldest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controlplane import errors
from controlplane.cluster import reservations
from controlplane.settings import Settings
from controlplane.state import fair_turns
from controlplane.state.deltas import Delta
from controlplane.state.fair_turns import Asked, Turn
from controlplane.state.records import Model, Phase
from controlplane.state.repository import State
from placement.types import CPU, Device, DeviceKey, Inventory, key_of
from profiler.types import ModelSpec
from workers.compression.recipe import ROWS, TOKENS, CompressRequest, Recipe
from workers.messages import in_file_names

PER_NODE = 1  # fine-tunes that are compressed at once on a node; others wait
MAX_ATTEMPTS = 3  # in a row without progress
RUNTIME_BYTES = 1 << 30  # for torch itself, and a GPU's libraries
FLOAT32_BYTES = 4
LOGITS_BYTES = 1 << 30

SQUARES = 13
"""Float32 squares of the widest input that are in memory at once: the Gram matrix, and 12 while its inverse's
factor is made, six of float64 (deltacompress; deltamix's error feedback takes 9)."""


@dataclass(frozen=True)
class CompressJob:
    """A request, the device that carries it out, and the memory to reserve there."""

    request: CompressRequest
    device: DeviceKey
    memory_bytes: int

    @property
    def node(self) -> str:
        return self.device.node


@dataclass(frozen=True)
class Queued:
    """The job has to wait; `reason` says for what."""

    reason: str


def next_job(state: State, name: str, inventory: Inventory, settings: Settings) -> CompressJob | Queued:
    """The job of a model that is to be compressed, if it may begin now, or the reason why it waits.

    Errors: CompressionFailed when it was cut off too often, or asks for a GPU that does not exist.
    """
    model = state.models[name].record
    delta, base = require_delta(model), _base(state, model)
    if delta.attempts >= MAX_ATTEMPTS:
        raise errors.CompressionFailed(
            f"{delta.attempts} attempts in a row stopped at {delta.share:.0%}; {delta.doing}"
        )
    seen = _seen(state, model, base, inventory, settings)
    if not seen:
        raise errors.CompressionFailed(
            f"the cluster has no device for compression.device {delta.recipe.device}; add such a device, or "
            'register the model with another "device"'
        )
    left = _left(state, model, seen, inventory, settings)
    if isinstance(left, Queued):
        return left
    chosen = _choose(state, model, left)
    if isinstance(chosen, Queued):
        return chosen
    on_cpu = chosen.device.kind == CPU
    request = CompressRequest(
        base=Path(base.path or ""),
        tuned=Path(delta.tuned),
        folder=folder_of(model, settings),
        recipe=delta.recipe,
        device="cpu" if on_cpu else "cuda",
        gpus=() if on_cpu else (chosen.device.index,),
        holder=reservations.compressing(name),
        memory_bytes=chosen.needed_bytes,
    )
    return CompressJob(request, key_of(chosen.device), chosen.needed_bytes)


def require_delta(model: Model) -> Delta:
    if model.delta is None:
        raise errors.InvalidRequest(f"'{model.name}' was not compressed by this installation")
    return model.delta


def folder_of(model: Model, settings: Settings) -> Path:
    """The folder of a model's delta; no other model uses it, not even a later one of the same name."""
    return settings.artifacts_folder / f"{in_file_names(model.name)}-{model.uid}"


def waiting(state: State) -> Iterator[Model]:
    """Models whose compression has no place yet, in the order of their turns."""
    having, turn_of = set(_holders(state)), _turns(state)
    for name in sorted(turn_of, key=lambda name: turn_of[name]):
        if reservations.compressing(name) not in having:
            yield state.models[name].record


def _turns(state: State) -> dict[str, Turn]:
    """The turns of the models that are to be compressed, including those that have begun."""
    having = set(_holders(state))
    models = (m.record for m in state.models.values() if m.record.phase is Phase.COMPRESSING)
    return fair_turns.turns(
        Asked(m.tenant, m.name, m.created_at_s, reservations.compressing(m.name) in having) for m in models
    )


def calibration_tokens(spec: ModelSpec, recipe: Recipe, text_bytes: int | None) -> int:
    """An upper bound of the calibration tokens: a row has at most the model's positions, and all rows
    together at most the file's bytes (None: unknown)."""
    asked = (recipe.rows or ROWS) * min(recipe.tokens or TOKENS, spec.max_position)
    return asked if text_bytes is None else min(asked, text_bytes)


def needed_bytes(spec: ModelSpec, recipe: Recipe, text_bytes: int | None = None) -> int:
    """Approximate memory of a job. It holds both sides of one layer and its delta, the squares of the widest
    input, and the activations of the calibration, of `text_bytes`, before and after. For an evaluation the
    whole model answers, and its logits need memory as well."""
    linear = sum(out * width for out, width in spec.linear_shapes.values())
    widest = max((width for _, width in spec.linear_shapes.values()), default=spec.hidden_size)
    activations = 2 * calibration_tokens(spec, recipe, text_bytes) * spec.hidden_size
    numbers = 3 * linear + SQUARES * widest**2 + activations + 2 * spec.vocab_size * spec.hidden_size
    whole = spec.weight_bytes // spec.dtype_bytes if recipe.evaluation else 0
    logits_bytes = LOGITS_BYTES if recipe.evaluation else 0
    return RUNTIME_BYTES + max(FLOAT32_BYTES * numbers, FLOAT32_BYTES * whole + logits_bytes)


def _base(state: State, model: Model) -> Model:
    base = state.models.get(model.base or "")
    if base is None or base.record.spec is None or base.record.path is None:
        raise errors.CompressionFailed(
            f"the base '{model.base}' is no longer registered; register the base again"
        )
    return base.record


def _holders(state: State) -> Iterator[str]:
    for ledger in state.ledgers.values():
        yield from (r.holder for r in ledger.record.reservations)


@dataclass(frozen=True)
class _Seen:
    """A device that may be used: its free memory, the job's need there, whether any memory of it is promised,
    and the memory of other compressions on it, which will end."""

    device: Device
    free_bytes: int
    needed_bytes: int
    shared: bool
    passing_bytes: int

    @property
    def comes(self) -> bool:
        """Whether there will be room without the end of any engine, which no job waits for."""
        return self.free_bytes + self.passing_bytes >= self.needed_bytes


def _seen(state: State, model: Model, base: Model, inventory: Inventory, settings: Settings) -> list[_Seen]:
    holder, delta = reservations.compressing(model.name), require_delta(model)
    recipe = delta.recipe
    assert base.spec is not None
    need = needed_bytes(base.spec, recipe, delta.text_bytes)
    promised = reservations.promised(state.ledgers, exclude=holder)
    passing = _compressing_bytes(state, holder)
    free = reservations.available(inventory, state.ledgers, settings.headroom, exclude=holder)
    return [
        _Seen(
            d, d.free_bytes, min(need, _most(d, settings)), bool(promised.get(key_of(d))), passing[key_of(d)]
        )
        for d in free.devices
        if recipe.device == "auto" or (recipe.device == "cpu") == (d.kind == CPU)
    ]


def _left(
    state: State, model: Model, seen: list[_Seen], inventory: Inventory, settings: Settings
) -> list[_Seen] | Queued:
    """The devices that no earlier model waits for. If an earlier model lacks only its turn on a node, that
    node is left to it, too. While an earlier model waits for memory that engines have, others may go."""
    left, before = seen, ""
    told = ("", model.tenant)  # other tenants' names are not shown
    for older in _older(state, model):
        base = state.models.get(older.base or "")
        if base is None or base.record.spec is None:
            continue  # this model is about to fail
        theirs = _seen(state, older, base.record, inventory, settings)
        keys = {key_of(s.device) for s in theirs if s.comes}
        nodes = {s.device.node for s in _roomy(older, theirs)}
        kept = [s for s in left if key_of(s.device) not in keys and s.device.node not in nodes]
        if len(kept) < len(left) and not before:
            before = f"'{older.name}'" if older.tenant in told else "an older fine-tune"
        left = kept
    return left or Queued(f"waits until the compression of {before} has begun")


def _older(state: State, model: Model) -> Iterator[Model]:
    """Waiting models that go before this one."""
    turn_of = _turns(state)
    return (other for other in waiting(state) if turn_of[other.name] < turn_of[model.name])


def _roomy(model: Model, seen: list[_Seen]) -> list[_Seen]:
    """Devices with enough memory. A job shares a GPU only if its recipe asks for one."""
    unshared = require_delta(model).recipe.device == "auto"
    return [
        s
        for s in seen
        if s.free_bytes >= s.needed_bytes and not (unshared and s.shared and s.device.kind != CPU)
    ]


def _most(device: Device, settings: Settings) -> int:
    """The most bytes to reserve: the need is known only roughly, and a job must not wait for it in vain."""
    return int(device.total_bytes * (1 - settings.headroom))


def _choose(state: State, model: Model, seen: list[_Seen]) -> _Seen | Queued:
    """The chosen device: a GPU before a CPU, the node where the job ran under an earlier controller
    before others."""
    delta = require_delta(model)
    others = _compressing_on(state, reservations.compressing(model.name))
    idle = [s for s in seen if others[s.device.node] < PER_NODE]
    if not idle:
        return Queued("waits for its turn: each node already runs as many compressions as allowed")
    measured = reservations.being_measured(state.ledgers)
    quiet = [s for s in idle if key_of(s.device) not in measured]
    if not quiet:
        return Queued("waits until an architecture has been measured")
    roomy = _roomy(model, quiet)
    if not roomy:
        gib = min(s.needed_bytes for s in quiet) / 2**30
        return Queued(f"waits for about {gib:.1f} GiB of free memory on a device")
    return min(
        roomy,
        key=lambda s: (s.device.kind == CPU, s.device.node != delta.node, -s.free_bytes, key_of(s.device)),
    )


def _compressing_bytes(state: State, exclude: str) -> Counter[DeviceKey]:
    """Bytes promised to other compressions, by device, without this holder's."""
    promised: Counter[DeviceKey] = Counter()
    for ledger in state.ledgers.values():
        for r in ledger.record.reservations:
            if r.holder.startswith(reservations.COMPRESSING) and r.holder != exclude:
                promised[DeviceKey(ledger.record.node, r.kind, r.index)] += r.memory_bytes
    return promised


def _compressing_on(state: State, exclude: str) -> Counter[str]:
    """The number of compressions on each node, without this holder's."""
    return Counter(
        ledger.record.node
        for ledger in state.ledgers.values()
        for r in ledger.record.reservations
        if r.holder.startswith(reservations.COMPRESSING) and r.holder != exclude
    )
