"""Hostile folders of models, adapters and deltas that try to break their reader, and their results.

Each folder is a sound folder with a few changes, drawn from a seed: the same seed draws the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from controlplane import errors
from controlplane.controller.registration import Limits, read_model_files
from controlplane.state.records import Model, Operation, OperationKind, Phase, dump, load
from testkit import checkpoints, variant_folders
from testkit.fuzz import hostile_json

Files = dict[str, bytes]
Special = Callable[[Path], None]  # makes something that is no plain file
BASE_KINDS = ("llama", "shards", "qwen2")
VARIANT_KINDS = ("lora", "boft", "sparse_delta", "svd_delta", "differences", "zstd")
ARCHITECTURES = tuple(
    f"{name}ForCausalLM"
    for name in (
        *(
            "Llama",
            "Mistral",
            "Qwen2",
            "Qwen3",
            "Gemma",
            "Gemma2",
            "Gemma3",
            "Phi",
            "Phi3",
            "GPTNeoX",
            "GPTJ",
        ),
        *("Falcon", "Mixtral", "Qwen2Moe", "Qwen3Moe"),
    )
)
MORE_KEYS: dict[str, Any] = {
    **{"num_local_experts": 4096, "num_experts": 4096, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"layer_types": ["full_attention"] * 2, "sliding_window": 8, "use_sliding_window": True, "head_dim": 4},
    **{"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 64, "rotary_dim": 4, "hidden_act": "silu"},
    **{"num_hidden_layers": 1024, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "dtype": "float16"},
    **{"quantization_config": {"bits": 4}, "auto_map": {"AutoModel": "code.X"}, "max_window_layers": 1},
}
LOSS = {
    "task": "t",
    "metric": "perplexity",
    "before": 1.0,
    "after": 2.0,
    "value": 9.0,
    "low": None,
    "high": 1e300,
}
VARIANT_KEYS: dict[str, Any] = {
    **{"quality": [{**LOSS, "items": 3}], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 1e300}},
    **{"use_rslora": True, "use_dora": True, "init_lora_weights": "pissa", "layers_to_transform": [0]},
    **{
        "target_modules": "(?i)" + "[a-\U0010ffff]" * 150,
        "lora_alpha": -0.0,
        "r": 2**70,
        "bias": "boft_only",
    },
    **{
        "added_rows": {"file": "x"},
        "group_size": 64,
        "groups": [{"bits": 3, "rank": 2}],
        "bits": 2,
        "version": 2,
    },
}
LENGTHS = (0, 1, 7, 8, 2**24, 2**24 + 1, 10**8, 10**8 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
MEMORY_BYTES = 256 << 20  # beyond what the process had before
CPU_S = 5.0
HANGS_S = 60


@dataclass(frozen=True)
class Seeds:
    """Sound folders, in memory by kind, and what was read of the bases that the variants are of."""

    root: Path
    folders: dict[str, Files]
    bases: dict[str, Model]


def sound(root: Path) -> Seeds:
    """The folders that everything is drawn from, made below `root`."""
    checkpoints.write_model(root / "llama")
    checkpoints.write_shards(root / "shards")
    spec = variant_folders.random_base(root / "qwen2")
    checkpoints.write_adapter(root / "lora")
    variant_folders.write_boft(root / "boft")
    for kind in ("sparse_delta", "svd_delta", "differences"):
        variant_folders.write_delta(root / kind, spec, kind)
    variant_folders.store_compressed(variant_folders.write_delta(root / "zstd", spec, "svd_delta"))
    limits = Limits((root,), 16)
    bases = {kind: read_model_files(_base(root / kind), None, limits, Path) for kind in ("llama", "qwen2")}
    return Seeds(root, {kind: _files(root / kind) for kind in (*BASE_KINDS, *VARIANT_KINDS)}, bases)


def _base(folder: Path) -> Model:
    return Model("base", 1, Phase.PROFILING, source=str(folder))


def _files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@dataclass(frozen=True)
class Case:
    """A hostile folder on disk, and the model that names it; `changes` says what was done to it."""

    model: Model
    base: Model | None
    changes: tuple[str, ...]


def draw(seeds: Seeds, seed: int, folder: Path) -> Case:
    """Write the folder of this seed."""
    random = Random(seed)
    kind = random.choice((*BASE_KINDS, *VARIANT_KINDS))
    files, changes = dict(seeds.folders[kind]), [kind]
    special: dict[str, Special] = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choice(sorted(files))
        change = random.choice(CHANGES)
        changes.append(f"{change.__name__} {name}")
        change(files, special, name, random)
    if random.random() < 0.5:
        _describe_again(files)
    _write(folder, files, special)
    if kind in BASE_KINDS:
        return Case(_base(folder), None, tuple(changes))
    base = seeds.bases["llama" if kind == "lora" else "qwen2"]
    return Case(Model("v", 2, Phase.PROFILING, base="base", adapter=str(folder)), base, tuple(changes))


def _write(folder: Path, files: Files, special: dict[str, Special]) -> None:
    folder.mkdir(parents=True)
    for name, raw in files.items():
        if name not in special:
            (folder / name).write_bytes(raw)
    for name, make in special.items():
        with contextlib.suppress(FileExistsError):
            make(folder / name)


def _describe_again(files: Files) -> None:
    """Sizes and checksums of a delta, as the files are now: else nothing behind them is ever reached."""
    try:
        raw = json.loads(files["delta.json"])
        for name, entry in raw["files"].items():
            at = entry.get("compressed", entry)
            held = files[f"{name}.zst" if "compressed" in entry else name]
            at |= {"size_bytes": len(held), "sha256": _sha256(held)}
        files["delta.json"] = json.dumps(raw).encode()
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return


def _sha256(raw: bytes) -> str:
    import hashlib

    return hashlib.sha256(raw).hexdigest()


# --- changes: each takes the files, what is no file, the name of one, and a source of chance ---------------


def scratch(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    files[name] = hostile_json.scratched(files[name], random)


def values(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    """Change a JSON file, or a safetensors header."""
    head, data = _split(files[name]) if name.endswith(".safetensors") else (files[name], None)
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return
    made = hostile_json.written(hostile_json.mutated(found, random, random.choice((1, 1, 2, 5))))
    files[name] = made if data is None else struct.pack("<Q", len(made)) + made + data


def config(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    """Change a base's config: any architecture, and keys that its reader knows. For a variant, change one
    field."""
    if "config.json" not in files:
        field(files, random)
        return
    name = "config.json"
    try:
        found = json.loads(files[name])
    except (KeyError, ValueError, RecursionError):
        return
    if not isinstance(found, dict):
        return
    if random.random() < 0.7:
        found["architectures"] = [random.choice(ARCHITECTURES)]
    for key in random.sample(sorted(MORE_KEYS), random.randrange(4)):
        found[key] = MORE_KEYS[key]
    if random.random() < 0.7:
        found[random.choice(sorted(found) or ["x"])] = hostile_json.hostile(random)
    files[name] = hostile_json.written(found)


def field(files: Files, random: Random) -> None:
    name = "delta.json" if "delta.json" in files else "adapter_config.json"
    try:
        found = json.loads(files[name])
        at = (
            found
            if random.random() < 0.6
            else random.choice([v for v in found.values() if isinstance(v, dict)])
        )
        key = random.choice((*at, *VARIANT_KEYS))
        at[key] = VARIANT_KEYS.get(key) if random.random() < 0.3 else hostile_json.hostile(random)
    except (KeyError, ValueError, IndexError, TypeError, AttributeError, RecursionError):
        return
    if random.random() < 0.3 and isinstance(at[key], dict | list):
        at[key] = hostile_json.mutated(at[key], random)
    files[name] = hostile_json.written(found)


def tensors(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    """Shapes, types and offsets that agree with each other, but not with the model."""
    name = random.choice([each for each in files if each.endswith(".safetensors")] or [name])
    head, data = _split(files[name])
    try:
        found = json.loads(head)
        key = random.choice([each for each in found if each != "__metadata__"])
        dtype, size = random.choice((("F32", 4), ("F16", 2), ("U8", 1), ("F64", 8), ("BOOL", 1)))
        shape = [random.choice((0, 1, 2, 3, 12, 64, 2**20, 2**40)) for _ in range(random.randrange(9))]
        count = size
        for each in shape:
            count *= each
        start = random.choice((0, found[key]["data_offsets"][0]))
        found[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + count]}
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return
    made = json.dumps(found).encode()
    files[name] = struct.pack("<Q", len(made)) + made + data


def length(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    files[name] = struct.pack("<Q", random.choice(LENGTHS)) + files[name][8:]


def content(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    """Change the tensors, or the end of a file."""
    raw, count = bytearray(files[name]), random.choice((1, 16))
    if len(raw) > 2 * count:
        at = random.randrange(len(raw) // 2, len(raw) - count + 1)
        raw[at : at + count] = random.choice((b"\xff", b"\x00", b"\x7f")) * count
        files[name] = bytes(raw)


def weight_map(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    places = (
        "../llama/model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "",
        ".safetensors",
        "\x00.safetensors",
    )
    key = random.choice(("x", "model.norm.weight"))
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {key: random.choice(places)}}).encode()


def remove(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    if len(files) > 1:
        del files[name]


def rename(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    other = random.choice(
        ("adapter_model.bin", "delta.json", "config.json", "adapter_config.json", "x.zst", "y")
    )
    files[other] = files[name]


def swap(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    other = random.choice(sorted(files))
    files[name], files[other] = files[other], files[name]


def replace_by_special(files: Files, special: dict[str, Special], name: str, random: Random) -> None:
    where = (
        name if random.random() < 0.8 else os.fsdecode(random.choice((b"\xff\xfe", b"a\nb", b"\xf0" * 200)))
    )
    special[where] = random.choice(SPECIALS)


def _split(raw: bytes) -> tuple[bytes, bytes]:
    size = struct.unpack("<Q", raw[:8].ljust(8, b"\0"))[0]
    return raw[8 : 8 + size], raw[8 + size :]


CHANGES = (
    *(scratch, values, values, values, config, config, tensors, tensors, length, content, content),
    *(weight_map, remove, rename, swap, replace_by_special),
)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _wide_header(path: Path) -> None:
    """As long as safetensors allows, and all of it there."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**8) + b'{"a":[')
        file.truncate(8 + 10**8)


def _zeros(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 20)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):  # the path may be too long
        made.bind(str(path))


def _device(path: Path) -> None:
    with contextlib.suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # as /dev/zero


def _deep(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.joinpath(*("d" * 200 for _ in range(12))).mkdir(parents=True)


def _to(target: str) -> Special:
    def link(path: Path) -> None:
        path.symlink_to(target)

    return link


SPECIALS: tuple[Special, ...] = (
    *(os.mkfifo, Path.mkdir, _huge, _wide_header, _zeros, _socket, _device, _deep),
    *map(_to, ("/etc/passwd", "/dev/zero", "/proc/self/mem", "..", ".", "nowhere", "config.json", "/")),
)


# --- what becomes of them -----------------------------------------------------------------------------------


class Broken(AssertionError):
    """What must not happen: the message says what did."""


def outcome(case: Case, read: Callable[[], Model], peak_bytes: int) -> str:
    """ "Ready", or the code of a refusal. Raises Broken for anything else; also when it takes too long, or
    takes this process beyond a peak of `peak_bytes`."""
    began_s = time.process_time()
    try:
        with _alarm():
            ready = read()
    except errors.OstinatoError as e:
        result = _refused(e)
    except Exception as e:
        raise Broken(f"an unexpected {type(e).__name__}: {e!s:.300}") from e
    else:
        if load(Model, dump(ready)) != ready:
            raise Broken("its record cannot be read again")
        result = ready.phase.value
    if (took_s := time.process_time() - began_s) > CPU_S:
        raise Broken(f"it took {took_s:.1f} s of CPU time")
    if (peak := peak_memory()) > peak_bytes:
        raise Broken(
            f"the process grew to {peak >> 20} MiB, from at most {(peak_bytes - MEMORY_BYTES) >> 20}"
        )
    return result


def _refused(error: errors.OstinatoError) -> str:
    if not 400 <= error.status < 500:
        raise Broken(f"{error.code}: {error.message[:300]}")
    try:
        dump(
            Operation(
                "o", OperationKind.REGISTER, "m", Phase.FAILED, reason=error.message, error=error.body()
            )
        )
    except ValueError as e:
        raise Broken(f"no record can hold {error.code}: {e!s:.200}") from e
    return error.code


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Cuts off what hangs."""

    def ring(*_: object) -> None:
        raise Broken(f"it hung for {HANGS_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def limits_of(seeds: Seeds) -> Limits:
    return Limits((seeds.root,), 16)


def in_this_process(seeds: Seeds, case: Case) -> Callable[[], Model]:
    return lambda: read_model_files(case.model, case.base, limits_of(seeds), Path)


@contextlib.contextmanager
def drawn(seeds: Seeds, seed: int) -> Iterator[Case]:
    """The case of this seed, gone afterwards."""
    folder = seeds.root / "drawn" / str(seed)
    try:
        yield draw(seeds, seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
