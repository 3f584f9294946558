"""Four variants of unequal size in one engine: do all of them stay on the device, and is the estimate right?

    python -m benchmarks.unequal_variants --folder /tmp/unequal --out MEASURED.json --only-measure
    python -m benchmarks.unequal_variants --folder /tmp/unequal --out RESULT.json
        [--known MEASUREMENTS.jsonl] [--profile-s 420]

A Llama-2-7B shape with dummy weights; a LoRA of rank 16 on q, k, v and o, one of rank 64 on all linear
layers, sparse deltas of 4 and of 2 bits. As the product does it: the architecture is measured
(`workers.measuring`), the plan has room for the registered variants together
(`controlplane.planning.variant_room`), and the estimate of the mix is that of `profiler.predicting`. Then one
engine of that plan is asked for each variant in turn, and for all at once.

- `path`: the request path of these requests, which the estimates of `together` contain. It is measured like
the product's (`controlplane.runtime.path_probe`), with a core that answers at once. Here it has no proxy and
no gateway: requests enter the worker's application in this process.
- `in_turn`: TTFT of each variant's requests, in rounds, while nothing else runs.
- `together`: for each batch, requests for the four in turn at once; tokens per second until the last ends,
next to the estimate of the same load.
- `residency`: all four are on the device after each has been asked once, and whenever it is looked at later.
- `moves`: a fifth variant, which was not planned for, takes the place of idle ones while both LoRAs decode,
  for which one of these has to move. Answers of both before, during and after it.

It passes if all four stay on the device, tokens per second of each batch are within 10% of the estimate, one
had to move, and answers after that are as they were before. Measurements are made once: they are in the
folder, `measurements.jsonl`, or in a file that is `--known`. On an H200 measuring takes five minutes, and the
rest four.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, gpu_lora, rehearsing, worker_with_loras
from benchmarks.serving import deltas
from benchmarks.worker_with_loras import BASE, LLAMA_7B, REHEARSED, Size, ask
from controlplane.planning.engine_config import engine_config
from controlplane.planning.variant_room import AtOnce, at_once, with_room_for_variants
from controlplane.profiling.keys import served_spec
from controlplane.profiling.usual_engine import BATCHED_TOKENS
from controlplane.settings import Settings
from controlplane.state.records import Model, Phase
from placement.types import Choice, EngineSizes, Placement, RankPlacement
from profiler.checkpoint import read_model
from profiler.measurements import read
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration
from profiler.plans import candidate_plans
from profiler.predicting.predict import Ground, Prediction, predict
from profiler.profiling_plan import Reach, profiling_plan
from profiler.request_path import Burst, RequestPath
from profiler.request_path import fit as fit_path
from profiler.roofline import VLLM_ON_CPU, VLLM_ON_GPU
from profiler.types import CPU, DeviceRates, Estimate, Interval, ModelSpec, Plan, Workload
from profiler.variants.held import held_bytes
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantKind, VariantLimits, launched_kinds
from workers.agent.device_rates import probe
from workers.measuring.engine_runs import carry_out
from workers.measuring.request import MeasureRequest
from workers.messages import EngineConfig, EngineResidency, VariantRef
from workers.server.worker import Worker
from workers.tiers import Tier

KINDS = (VariantKind.LORA, VariantKind.SPARSE_DELTA)
WITHIN = 0.1
SLOTS = 4
LOOK_S = 0.2
ROUNDS = 5
PATH_ROUNDS, PATH_MARKER = 8, "measures-the-path"
ALL_LINEAR = tuple(name.split(".")[1] for name in gpu_engine.linear_shapes(gpu_engine.LLAMA_7B))
PROMPT = 7  # of the requests whose answers are compared


@dataclass(frozen=True)
class Scale:
    """The served requests and their time; `batches` are sent to all variants together."""

    size: Size
    batches: tuple[int, ...] = (8, 32, 64)
    repeats: int = 3
    max_rank: int = 64
    small_rank: int = 16
    max_model_len: int = 2048
    moving_tokens: int = 512


FULL = Scale(LLAMA_7B)
TINY = Scale(REHEARSED, (4,), 1, 8, 2, 128, 24)


def write_variants(base: Path, folder: Path, scale: Scale) -> dict[str, Path]:
    """By name, in the order in which they are placed; the last one is not planned for, and larger than the
    one whose place it takes: those behind that one move."""
    shape = scale.size.shape
    narrow = scale.size
    wide = dataclasses.replace(narrow, adapters_deviation=narrow.adapters_deviation / 4)
    return {
        "lora-small": adapter(folder / "lora-small", 1, narrow, scale.small_rank, gpu_lora.ATTENTION),
        "delta-4": deltas.write(base, shape, folder / "delta-4", 4, 4),
        "lora-large": adapter(folder / "lora-large", 2, wide, scale.max_rank, ALL_LINEAR),
        "delta-2": deltas.write(base, shape, folder / "delta-2", 2, 3),
        "delta-late": deltas.write(base, shape, folder / "delta-late", 4, 5, whole_tables=True),
    }


def adapter(folder: Path, seed: int, size: Size, rank: int, modules: Sequence[str]) -> Path:
    """Written once."""
    if (folder / "adapter_config.json").exists():
        return folder
    return gpu_lora.write_adapter(folder, rank, seed, size.shape, modules, size.adapters_deviation)


def measured(
    base: Path, spec: ModelSpec, kind: str, args: argparse.Namespace, settings: Settings, scale: Scale
) -> Path:
    """The lines of a profile of the base, as far as this mix needs it."""
    path: Path = args.known or args.folder / "measurements.jsonl"
    if path.exists() or kind == CPU:
        return path
    reach = Reach(
        on_cpu=False,
        devices=1,
        device_bytes=settings.profile_bytes,
        max_model_len=scale.max_model_len,
        max_sequences=max(scale.batches),
        batched_tokens=BATCHED_TOKENS,
        max_lora_rank=scale.max_rank,
        max_variants=SLOTS,
    )
    needed = {kind.value for kind in KINDS}
    runs = tuple(run for run in profiling_plan(spec, reach) if needed.issuperset(run.setting.launched))
    request = MeasureRequest(
        base,
        args.folder / "profile",
        runs,
        (),
        kind,
        (0,),
        settings.profile_bytes,
        LLAMA_7B.dtype,
        scale.max_model_len,
        args.profile_s,
    )
    lines = []
    for line in carry_out(request):
        lines.append(line)
        print(f"measured {len(lines)}: {line[:200]}", flush=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def placement_of(plan: Plan, predicted: Prediction, spec: ModelSpec, size: Size) -> Placement:
    """On the one device."""
    (rank,) = predicted.ranks
    kv_bytes = plan.kv_cache_tokens * spec.kv_bytes_per_token_per_layer * spec.num_layers
    planned = size.memory_bytes or round(rank.total.value) - rank.kv_cache + kv_bytes
    on_device = RankPlacement(0, 0, 0, "", 0, size.device_kind, 0, spec.num_layers, planned)
    return Placement(plan, (on_device,), _estimate(predicted, planned), "", Choice())


def _estimate(predicted: Prediction, planned: int) -> Estimate:
    ttft_s, tpot_s = predicted.ttft_s.value, predicted.tpot_s.value
    return Estimate(ttft_s, tpot_s, (planned,), 100.0, predicted.basis)


# --- requests to the engine ---------------------------------------------------------------------------


class Looking:
    """Looks at where variants are, all the time."""

    def __init__(self, worker: Worker, watched: Sequence[VariantRef]) -> None:
        self._worker, self._watched = worker, watched
        self.looks = 0
        self.absent: list[dict[str, str]] = []

    async def look(self) -> EngineResidency:
        seen = await self._worker.engine.residency()  # the worker's own answer may be half a second old
        tiers = {place.uid: place.tier for place in seen.variants}
        self.looks += 1
        self.absent += [
            {"variant": v.name, "tier": str(tiers.get(v.uid))}
            for v in self._watched
            if tiers.get(v.uid) is not Tier.DEVICE
        ]
        return seen

    @asynccontextmanager
    async def meanwhile(self) -> AsyncIterator[None]:
        async def again() -> None:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)

        task = asyncio.create_task(again())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def path_of(worker: Worker, variants: Sequence[VariantRef], scale: Scale) -> RequestPath:
    """The request path of bursts for the variants in turn: the core answers at once, with one token."""
    short = dataclasses.replace(scale.size, output_tokens=1)

    async def burst(batch: int) -> Burst:
        jobs = [
            ask(worker, variants[i % len(variants)], i, "path", short, f"{PATH_MARKER}-{batch}-{i}")
            for i in range(batch)
        ]
        answers = await asyncio.gather(*jobs)
        return Burst(worker_with_loras.INPUT_TOKENS, tuple(answer.ttft_s for answer in answers))

    batches = (1, *scale.batches)
    await worker.answer_at_once(PATH_MARKER)
    try:
        for batch in batches:
            await burst(batch)  # warms up
        return fit_path([await burst(batch) for _ in range(PATH_ROUNDS) for batch in batches])
    finally:
        await worker.answer_at_once("")


async def in_turn(worker: Worker, variants: Sequence[VariantRef], size: Size) -> dict[str, Any]:
    """TTFT of one request at a time: the first of each variant, and those of later rounds."""
    short = dataclasses.replace(size, output_tokens=min(8, size.output_tokens))
    found = [
        [1e3 * (await ask(worker, v, 100 * number + v.uid, "turn", short)).ttft_s for v in variants]
        for number in range(ROUNDS + 1)
    ]
    later = [ttft for row in found[1:] for ttft in row]
    first = {v.name: ttft for v, ttft in zip(variants, found[0], strict=True)}
    return {"first_ttft_ms": first, **_percentiles("ttft_ms", later)}


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"{name}_p{share}": ordered[round(share / 100 * last)] for share in (50, 95)}


async def together(
    worker: Worker, variants: Sequence[VariantRef], batch: int, predicted: Prediction, scale: Scale
) -> dict[str, Any]:
    """Bursts: requests for the variants in turn at once, next to the estimate of that load."""
    bursts = []
    for number in range(scale.repeats + 1):
        began = time.perf_counter()
        jobs = [
            ask(worker, variants[i % len(variants)], i, f"{batch}-{number}", scale.size) for i in range(batch)
        ]
        answers = await asyncio.gather(*jobs)
        bursts.append((time.perf_counter() - began, answers))
    counted = bursts[1:]  # the first warms up
    rate = statistics.median(batch * scale.size.output_tokens / took_s for took_s, _ in counted)
    ttfts = [1e3 * answer.ttft_s for _, answers in counted for answer in answers]
    tpots = [1e3 * answer.tpot_s for _, answers in counted for answer in answers]
    return {
        "batch": batch,
        "tokens_per_s": rate,
        "estimate_tokens_per_s": _interval(predicted.tokens_per_s),
        "measured_over_estimate": rate / predicted.tokens_per_s.value,
        **_percentiles("ttft_ms", ttfts),
        "mean_ttft_ms": statistics.mean(ttfts),
        "last_burst_ttft_ms": sorted(round(ttft, 1) for ttft in ttfts[-batch:]),
        "estimate_ttft_ms": _interval(predicted.ttft_s, 1e3),
        "mean_tpot_ms": statistics.mean(tpots),
        "estimate_tpot_ms": _interval(predicted.tpot_s, 1e3),
        "estimate_notes": list(predicted.notes),
        "latency_s": statistics.median(took_s for took_s, _ in counted),
        "estimate_latency_s": _interval(predicted.latency_s),
    }


def _interval(interval: Interval, factor: float = 1.0) -> dict[str, float]:
    return {name: factor * value for name, value in dataclasses.asdict(interval).items()}


async def moves(
    worker: Worker, variants: Sequence[VariantRef], late: VariantRef, scale: Scale
) -> dict[str, Any]:
    """The late one is asked for while both LoRAs decode; what they answer before it, meanwhile and after it.
    A short answer of the late one says that it is there."""
    loras = [v for v in variants if v.name.startswith("lora")]
    long = dataclasses.replace(scale.size, output_tokens=scale.moving_tokens)
    short = scale.size

    async def alone(variant: VariantRef, salt: str) -> list[int]:
        return (await ask(worker, variant, PROMPT, salt, short)).tokens

    before = {v.name: await alone(v, "before") for v in loras}
    again = {v.name: await alone(v, "again") for v in loras}
    tasks = [asyncio.create_task(ask(worker, v, PROMPT, "meanwhile", long)) for v in loras]
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    await ask(worker, late, PROMPT, "late", dataclasses.replace(short, output_tokens=4))
    took_s, decoding = time.perf_counter() - began, sum(not task.done() for task in tasks)
    meanwhile = {
        v.name: answer.tokens[: short.output_tokens]
        for v, answer in zip(loras, await asyncio.gather(*tasks), strict=True)
    }
    seen = await worker.engine.residency()
    after = {v.name: await alone(v, "after") for v in loras}
    return {
        "late_took_s": took_s,
        "device_bytes": {v.name: _device_bytes(seen, v) for v in (*variants, late)},
        "loras_decoding_then": decoding,
        "tiers": {v.name: _tier(seen, v) for v in (*variants, late)},
        "leading_tokens_equal_before": {name: _leading(again[name], before[name]) for name in before},
        "leading_tokens_equal_after": {name: _leading(after[name], before[name]) for name in before},
        "leading_tokens_equal_meanwhile": {
            name: _leading(meanwhile[name], tokens) for name, tokens in before.items()
        },
        "all_back": await _each_once(worker, variants, short),
    }


def _tier(seen: EngineResidency, variant: VariantRef) -> str:
    return next((str(place.tier) for place in seen.variants if place.uid == variant.uid), "nowhere")


def _device_bytes(seen: EngineResidency, variant: VariantRef) -> int:
    ranks = next((place.ranks for place in seen.variants if place.uid == variant.uid), ())
    return max((rank.device_bytes for rank in ranks), default=0)


def _leading(tokens: Sequence[int], others: Sequence[int]) -> float:
    pairs = list(zip(tokens, others, strict=True))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs)


async def _each_once(worker: Worker, variants: Sequence[VariantRef], size: Size) -> dict[str, str]:
    for variant in variants:
        await ask(worker, variant, PROMPT, "back", dataclasses.replace(size, output_tokens=2))
    seen = await worker.engine.residency()
    return {v.name: _tier(seen, v) for v in variants}


@dataclass(frozen=True)
class Served:
    """The plan of the base, the ground and the mix of its estimates; what the engine is started with."""

    models: tuple[Model, ...]  # the last one was registered after the engine was placed
    plan: Plan
    ground: Ground
    config: EngineConfig
    about: dict[str, Any]

    def estimates(self, scale: Scale, path: RequestPath | None = None) -> dict[int, Prediction]:
        """By batch: what clients see with this request path; without a path, the engine alone."""
        mix = [model.variant_spec for model in self.models[:-1]]
        ground = dataclasses.replace(self.ground, path=path)
        return {batch: predict(ground, self.plan, load_of(batch, scale), mix) for batch in scale.batches}


def load_of(batch: int, scale: Scale) -> Workload:
    return Workload(batch, worker_with_loras.INPUT_TOKENS, scale.size.output_tokens)


def prepare(args: argparse.Namespace, scale: Scale) -> Served:
    """The control plane's steps when the first four are registered and the base is deployed."""
    size = scale.size
    settings = Settings(home=args.folder / "home", engine_dtype=size.dtype)
    base = gpu_engine.write_dummy_base(args.folder / "model", size.shape)
    paths = write_variants(base, args.folder, scale)
    spec = served_spec(read_model(base), size.dtype)
    models = tuple(
        registered(number, name, path, spec) for number, (name, path) in enumerate(paths.items(), 1)
    )
    known = measured(base, spec, size.device_kind, args, settings, scale)
    calibration = calibrate(spec, read(known)) if known.exists() else None
    device = probe("gpu-host").devices[0]
    ground = ground_of(spec, DeviceRates(device.memory_bytes_per_s, device.flops_per_s), calibration, size)
    (plan, *_) = candidate_plans(spec, ("none",), 1, scale.max_model_len, max(scale.batches), 0, 0)
    sizes = EngineSizes(variant_slots=SLOTS, lora_rank=scale.max_rank, variant_host_bytes=16 << 30)
    plan = with_room_for_variants(plan, spec, sizes, models[:-1])
    mix = [model.variant_spec for model in models[:-1]]
    alone = predict(ground, plan, load_of(scale.batches[0], scale), mix)
    placed = placement_of(plan, alone, spec, size)
    model = Model(BASE, 100, Phase.READY, source=str(base), path=str(base), spec=spec)
    config = engine_config(model, placed, settings, models[:-1])
    about = {
        "device": device.kind,
        "variants": {m.name: _size_of(m) for m in models},
        "room_bytes": config.ranks[0].variant_memory_bytes,
        "at_once": _counted(at_once(plan, spec, models[:-1])),
        "at_once_with_late": _counted(at_once(plan, spec, models)),
        "estimates_from": "measurements" if calibration else "a roofline",
        "input_tokens": worker_with_loras.INPUT_TOKENS,
        "output_tokens": size.output_tokens,
    }
    made_here = dataclasses.replace(config, load_format="dummy", roots=())
    return Served(models, plan, ground, made_here, about)


def registered(number: int, name: str, path: Path, spec: ModelSpec) -> Model:
    manifest = read_manifest(path, spec, VariantLimits(max_lora_rank=512))
    variant = dataclasses.replace(manifest.spec, held=held_bytes(manifest))
    return Model(name, number, Phase.READY, base=BASE, adapter=str(path), variant_spec=variant)


async def run(args: argparse.Namespace, scale: Scale) -> dict[str, Any]:
    served = await asyncio.to_thread(prepare, args, scale)
    worker = Worker(served.config, "127.0.0.1")
    started = time.monotonic()
    await worker.start()
    result = {**served.about, "engine_start_s": time.monotonic() - started}
    *refs, late = (VariantRef(model.name, model.uid, model.adapter or "") for model in served.models)
    try:
        for ref in refs:
            await worker.load_variant(ref)
        report = await worker.report()
        result["engine_version"] = report.engine_version
        result["ranks"] = [dataclasses.asdict(rank) for rank in report.ranks]
        result["in_turn"] = await in_turn(worker, refs, scale.size)
        path = await path_of(worker, refs, scale)
        result["path"] = dataclasses.asdict(path)
        result |= await watched(worker, refs, served.estimates(scale, path), scale)
        await worker.load_variant(late)
        result["moves"] = await moves(worker, refs, late, scale)
    finally:
        await worker.close()
    return {**result, "passes": passes(result)}


async def watched(
    worker: Worker, refs: Sequence[VariantRef], estimates: dict[int, Prediction], scale: Scale
) -> dict[str, Any]:
    """Requests in turn once more, and together, while a thread looks at the variants' residency."""
    looking, rows = Looking(worker, refs), []
    seen = await looking.look()
    async with looking.meanwhile():
        again = await in_turn(worker, refs, scale.size)
        for batch, predicted in estimates.items():
            rows.append(await together(worker, refs, batch, predicted, scale))
            print(json.dumps(rows[-1]), flush=True)
    return {
        "device_bytes": {v.name: _device_bytes(seen, v) for v in refs},
        "again_in_turn": again,
        "together": rows,
        "residency": {"looks": looking.looks, "absent": looking.absent},
    }


def ground_of(spec: ModelSpec, rates: DeviceRates, calibration: Calibration | None, size: Size) -> Ground:
    on_cpu = size.device_kind == CPU
    return Ground(
        spec,
        (rates,),
        calibration,
        overheads=VLLM_ON_CPU if on_cpu else VLLM_ON_GPU,
        launched=() if on_cpu else tuple(kind.value for kind in launched_kinds(KINDS)),
    )


def _counted(found: AtOnce | None) -> dict[str, Any]:
    return {} if found is None else dataclasses.asdict(found)


def _size_of(model: Model) -> dict[str, Any]:
    spec = model.variant_spec
    if spec is None:
        return {}
    return {"kind": spec.kind, "rank": spec.max_rank, "bits": spec.bits, "stored_bytes": spec.weight_bytes}


def passes(result: dict[str, Any]) -> dict[str, bool]:
    """Whether each aim is met."""
    moved = result["moves"]
    before, after = (moved[f"leading_tokens_equal_{when}"] for when in ("before", "after"))
    sizes = result["device_bytes"]
    gaps = [sizes[name] for name in sizes if not moved["device_bytes"][name]]  # of those that left
    gaps.append(result["room_bytes"] - sum(sizes.values()))  # what was free, at the end of the arena
    return {
        "all_fit": result["at_once"]["count"] == len(result["variants"]) - 1,
        "all_stay": not result["residency"]["absent"] and result["residency"]["looks"] > 1,
        "as_estimated": all(abs(r["measured_over_estimate"] - 1) <= WITHIN for r in result["together"]),
        "moved_unharmed": moved["tiers"]["delta-late"] == Tier.DEVICE
        and all(after[name] >= before[name] for name in after),
        "moved": moved["device_bytes"]["delta-late"] > max(gaps),
        "all_back": set(moved["all_back"].values()) == {str(Tier.DEVICE)},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--known", type=Path, help="measurements that were made before")
    parser.add_argument("--profile-s", type=float, default=420.0, help="longest that measuring may take")
    parser.add_argument("--only-measure", action="store_true", help="write the files, measure, and end")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    scale = TINY if rehearsing.is_rehearsal() else FULL
    command = rehearsing.command("benchmarks.unequal_variants", argv)
    if args.only_measure:
        estimates = prepare(args, scale).estimates(scale)
        found = {batch: _interval(predicted.tokens_per_s) for batch, predicted in estimates.items()}
        rehearsing.write_result(args.out, {"command": command, "tokens_per_s": found})
        return
    result = asyncio.run(run(args, scale))
    rehearsing.write_result(args.out, {"command": command, **result})
    print(json.dumps(result, indent=1))


def rehearse(folder: Path) -> None:
    """All but the measuring, on a tiny model and vLLM's CPU engine, in a process of its own."""
    out = folder / "unequal.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.unequal_variants",
        "--folder",
        str(folder),
        "--out",
        str(out),
    ]
    # Settings for tests of kernels are not for an engine.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**worker_with_loras.ON_CPU, **inherited}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[1])
    record = rehearsing.check(out, "command", "variants", "together", "device_bytes")
    full_size_only = ("as_estimated", "moved")
    passed = {name: met for name, met in record["passes"].items() if name not in full_size_only}
    assert all(passed.values()), record


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
