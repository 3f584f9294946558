"""Which fine-tune is compressed next, where, with how much memory: one at a time on a node; of those that
wait for the same devices one of each tenant before a second of any, the oldest first. Pure."""

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

PER_NODE = 1  # fine-tunes that are compressed at once on a node; others wait
MAX_ATTEMPTS = 3  # in a row that get no further
RUNTIME_BYTES = 1 << 30  # torch itself, and what a GPU's libraries take
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
        return self.device[0]


@dataclass(frozen=True)
class Queued:
    """It has to wait; `reason` says for what."""

    reason: str


def next_job(state: State, name: str, inventory: Inventory, settings: Settings) -> CompressJob | Queued:
    """The job of a model that is to be compressed, if it may begin now, or why it waits.

    Errors: CompressionFailed when it was cut off too often, or asks for a GPU that is not there.
    """
    model = state.models[name].record
    delta, base = require_delta(model), _base(state, model)
    if delta.attempts >= MAX_ATTEMPTS:
        raise errors.CompressionFailed(
            f"{delta.attempts} attempts in a row got no further than {delta.share:.0%}; {delta.doing}"
        )
    seen = _seen(state, model, base, inventory, settings)
    if not seen:
        raise errors.CompressionFailed(
            f"expected a device for it ({delta.recipe.device}), the cluster has none; add one, or register "
            'it with another "device"'
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
        raise errors.InvalidRequest(f"'{model.name}' is not made of a fine-tune here")
    return model.delta


def folder_of(model: Model, settings: Settings) -> Path:
    """Where the delta of a model is made: no other model's, not even of one of the same name later."""
    return settings.artifacts_folder / f"{model.name}-{model.uid}"


def waiting(state: State) -> Iterator[Model]:
    """Models whose compressing has no place yet, in the order of their turns."""
    having, turn_of = set(_holders(state)), _turns(state)
    for name in sorted(turn_of, key=lambda name: turn_of[name]):
        if reservations.compressing(name) not in having:
            yield state.models[name].record


def _turns(state: State) -> dict[str, Turn]:
    """Of the models that are to be compressed, those that have begun included."""
    having = set(_holders(state))
    models = (m.record for m in state.models.values() if m.record.phase is Phase.COMPRESSING)
    return fair_turns.turns(
        Asked(m.tenant, m.name, m.created_at_s, reservations.compressing(m.name) in having) for m in models
    )


def calibration_tokens(spec: ModelSpec, recipe: Recipe, text_bytes: int | None) -> int:
    """How many are run at most: a row has no more than the model has positions, and all rows no more than
    their file has bytes (None: that is not known)."""
    asked = (recipe.rows or ROWS) * min(recipe.tokens or TOKENS, spec.max_position)
    return asked if text_bytes is None else min(asked, text_bytes)


def needed_bytes(spec: ModelSpec, recipe: Recipe, text_bytes: int | None = None) -> int:
    """Memory of a job, roughly: both sides of one layer and its delta, the squares of the widest input, and
    the activations of the calibration, of `text_bytes`, before and after. To be evaluated the whole model
    answers, and its logits take some as well."""
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
        raise errors.CompressionFailed(f"the base '{model.base}' is no longer registered; register it again")
    return base.record


def _holders(state: State) -> Iterator[str]:
    for ledger in state.ledgers.values():
        yield from (r.holder for r in ledger.record.reservations)


@dataclass(frozen=True)
class _Seen:
    """A device that may be used, what of it is free, what the job would take there, whether anything else was
    promised memory of it, and what of it others have that are compressed, which end."""

    device: Device
    free_bytes: int
    needed_bytes: int
    shared: bool
    passing_bytes: int

    @property
    def comes(self) -> bool:
        """Whether there will be room without any engine's end, for which nobody should wait with it."""
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
    """The devices that no model before it waits for. A node where one before it lacks nothing but its turn is
    left to it, too. Where one waits for memory that engines have, others go meanwhile."""
    left, before = seen, ""
    told = ("", model.tenant)  # of others' names nothing is said
    for older in _older(state, model):
        base = state.models.get(older.base or "")
        if base is None or base.record.spec is None:
            continue  # it is about to fail
        theirs = _seen(state, older, base.record, inventory, settings)
        keys = {key_of(s.device) for s in theirs if s.comes}
        nodes = {s.device.node for s in _roomy(older, theirs)}
        kept = [s for s in left if key_of(s.device) not in keys and s.device.node not in nodes]
        if len(kept) < len(left) and not before:
            before = f"'{older.name}'" if older.tenant in told else "an older one"
        left = kept
    return left or Queued(f"waits until {before} has begun to be compressed")


def _older(state: State, model: Model) -> Iterator[Model]:
    """Those that wait and go before it."""
    turn_of = _turns(state)
    return (other for other in waiting(state) if turn_of[other.name] < turn_of[model.name])


def _roomy(model: Model, seen: list[_Seen]) -> list[_Seen]:
    """Devices with the memory for it. Nobody who does not ask for it shares a GPU."""
    unshared = require_delta(model).recipe.device == "auto"
    return [
        s
        for s in seen
        if s.free_bytes >= s.needed_bytes and not (unshared and s.shared and s.device.kind != CPU)
    ]


def _most(device: Device, settings: Settings) -> int:
    """What is reserved at most: what is needed is known roughly, and must not be waited for in vain."""
    return int(device.total_bytes * (1 - settings.headroom))


def _choose(state: State, model: Model, seen: list[_Seen]) -> _Seen | Queued:
    """A GPU before a CPU, the node it was on before others."""
    delta = require_delta(model)
    others = _compressing_on(state, reservations.compressing(model.name))
    idle = [s for s in seen if others[s.device.node] < PER_NODE]
    if not idle:
        return Queued("waits for its turn: as many are compressed on each node as may be")
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
    """What is promised to those that are compressed, by device, but for this holder."""
    promised: Counter[DeviceKey] = Counter()
    for ledger in state.ledgers.values():
        for r in ledger.record.reservations:
            if r.holder.startswith(reservations.COMPRESSING) and r.holder != exclude:
                promised[ledger.record.node, r.kind, r.index] += r.memory_bytes
    return promised


def _compressing_on(state: State, exclude: str) -> Counter[str]:
    """How many are compressed on each node, but for this holder."""
    return Counter(
        ledger.record.node
        for ledger in state.ledgers.values()
        for r in ledger.record.reservations
        if r.holder.startswith(reservations.COMPRESSING) and r.holder != exclude
    )
