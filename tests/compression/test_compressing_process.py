"""Compressing in a process of its own: real checkpoints, real kills."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from pydantic import TypeAdapter

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_variant
from profiler.variants.types import VariantKind, VariantLimits
from testkit import checkpoints
from workers.agent import host
from workers.agent.sampling import holder_of
from workers.clean_environment import forget_secrets, without_secrets
from workers.compression.__main__ import may_pass
from workers.compression.lines import Artifact, Done, Failed, Line, Progress, from_line, left_s, to_line
from workers.compression.process import CompressingError, carry_out
from workers.compression.recipe import CompressRequest, Recipe
from workers.compression.work_folder import path_for

LAYERS = 300  # enough to be killed between two of them on a quick machine
CONFIG = checkpoints.config(
    num_hidden_layers=LAYERS,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a fine-tune of it."""
    root = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(5)

    def drawn(scale: float) -> checkpoints.Tensors:
        shapes = checkpoints.tensors(CONFIG)
        return {name: (scale * random.standard_normal(s)).astype(np.float32) for name, s in shapes.items()}

    base, delta = drawn(0.1), drawn(0.01)
    checkpoints.write_model(root / "base", CONFIG, base)
    checkpoints.write_model(root / "tuned", CONFIG, {name: base[name] + delta[name] for name in base})
    return root / "base", root / "tuned"


def request_for(folders: tuple[Path, Path], folder: Path, **recipe: object) -> CompressRequest:
    given = TypeAdapter(Recipe).validate_python({"method": "magnitude", **recipe})
    return CompressRequest(*folders, folder, given, holder="compressing:v")


def lines_of(request: CompressRequest) -> list[Line]:
    return [from_line(line) for line in carry_out(request)]


def artifact_of(lines: list[Line]) -> Artifact:
    assert isinstance(lines[-1], Done), lines[-1]
    return lines[-1].artifact


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def compressors() -> list[psutil.Process]:
    """Processes of this test run that compress."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            if "workers.compression" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_lines_survive_writing_and_reading() -> None:
    for line in (Progress(0.25, "layer 1", 3.5), Failed("no"), Done(Artifact("m", "lora", 1, 2))):
        assert from_line(to_line(line)) == line
        json.loads(to_line(line))


def test_seconds_left_at_the_pace_so_far() -> None:
    assert left_s(0.0, 0.25, 10.0) == pytest.approx(30.0)
    assert left_s(0.5, 0.75, 10.0) == pytest.approx(10.0), "what was done before took no time"
    assert left_s(0.5, 0.5, 10.0) is None


@dataclass(frozen=True)
class Undisturbed:
    """A compression that nothing interrupted, and its lines."""

    request: CompressRequest
    lines: list[Line]


@pytest.fixture(scope="module")
def undisturbed(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    request = request_for(folders, tmp_path_factory.mktemp("undisturbed") / "work")
    return Undisturbed(request, lines_of(request))


@pytest.mark.slow
def test_the_process_makes_a_variant_and_reports_progress(
    folders: tuple[Path, Path], undisturbed: Undisturbed
) -> None:
    request, lines = undisturbed.request, undisturbed.lines
    artifact = artifact_of(lines)
    made = read_variant(request.artifact, read_model(folders[0]), VariantLimits(0))
    assert (made.kind, artifact.kind) == (VariantKind.SPARSE_DELTA, "sparse_delta")
    assert artifact.tuned_bytes == 2 * sum(
        int(np.prod(shape)) for shape in checkpoints.tensors(CONFIG).values()
    )
    assert 0 < artifact.size_bytes < artifact.tuned_bytes
    assert set(artifact.layer_errors) == set(checkpoints.TINY_LINEAR)
    shares = [line.share for line in lines if isinstance(line, Progress)]
    assert shares == sorted(shares)
    before = contents(request.artifact)
    assert lines_of(request)[-1] == Done(artifact), "asked again it has nothing to do"
    assert contents(request.artifact) == before


def kill_at(request: CompressRequest, share: float) -> None:
    """Kill -9 the process once it says that so much is done. Raises CompressingError, as it then ends."""
    for text in carry_out(request):
        line = from_line(text)
        assert not isinstance(line, Done), "it was to be killed before its end"
        if isinstance(line, Progress) and line.share >= share:
            for victim in compressors():
                victim.kill()


def layers_in(folder: Path) -> set[tuple[int, int]]:
    """Which files of layers are there, and when each was written."""
    return {(f.stat().st_ino, f.stat().st_mtime_ns) for f in folder.rglob("layer*.safetensors")}


@pytest.mark.slow
def test_a_killed_process_continues_and_makes_the_same_files(
    folders: tuple[Path, Path], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Kill -9 after a third, and again at the same place in what is left."""
    request = request_for(folders, tmp_path / "work")
    for share in (0.3, 0.6):
        with pytest.raises(CompressingError, match="SIGKILL"):
            kill_at(request, share)
    written = layers_in(tmp_path / "work")
    assert len(written) > LAYERS // 3
    artifact_of(lines_of(request))
    anew = written - layers_in(request.artifact)
    assert len(anew) <= 1, "only the layer may be made anew in which it was killed"
    assert contents(request.artifact) == contents(undisturbed.request.artifact)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "published"])
def test_work_of_another_kind_of_device_is_done_again(
    folders: tuple[Path, Path], undisturbed: Undisturbed, tmp_path: Path, end: str
) -> None:
    """The cluster may choose another device after a kill. Layers of both devices would belong to neither."""
    request = request_for(folders, tmp_path / "work")
    with pytest.raises(CompressingError, match="SIGKILL"):
        kill_at(request, 0.3)
    work = path_for(request.artifact)
    job = json.loads((work / "job.json").read_text())
    (work / "job.json").write_text(json.dumps(job | {"computed by": "cuda, bfloat16"}))
    if end == "published":
        (work / "result.json").write_text("{}")
        request.artifact.mkdir()
    lines = lines_of(request)
    assert not any(isinstance(line, Progress) and "before" in line.doing for line in lines), lines
    artifact_of(lines)
    assert contents(request.artifact) == contents(undisturbed.request.artifact)


@pytest.mark.slow
def test_the_compressing_process_has_limits_and_no_secrets(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_API_KEY", "the-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-key")
    monkeypatch.setenv("OSTINATO_STORE_URL", "redis://:the-key@host")
    lines = carry_out(replace(request_for(folders, tmp_path / "job"), memory_bytes=1 << 30))
    try:
        next(lines)
        (process,) = compressors()
        assert "the-key" not in " ".join(process.environ().values())
        assert {"PATH", "HOME"} <= process.environ().keys()
        bounds = [process.rlimit(kind)[1] for kind in (psutil.RLIMIT_DATA, psutil.RLIMIT_CORE)]
        assert bounds == [6 << 30, 0]
    finally:
        lines.close()  # type: ignore[attr-defined]


def test_processes_with_vllm_have_its_settings_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("OSTINATO_API_KEY", "OSTINATO_STORE_URL", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in (*secret, "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "value")
    kept = without_secrets()
    assert kept["VLLM_CPU_KVCACHE_SPACE"] == "value"
    assert not set(secret) & kept.keys()
    forget_secrets()
    assert dict(os.environ) == kept


def test_closing_the_compression_ends_its_process(folders: tuple[Path, Path], tmp_path: Path) -> None:
    lines = carry_out(request_for(folders, tmp_path / "work"))
    assert isinstance(from_line(next(lines)), Progress)
    (process,) = compressors()
    assert holder_of(process.pid, host.processes()) == "compressing:v", "the node knows whose its memory is"
    lines.close()  # type: ignore[attr-defined]
    assert compressors() == []


@pytest.mark.slow
def test_the_process_ends_with_its_parent(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A Ray task that is killed has no time to say so."""
    request = request_for(folders, tmp_path / "work")
    job = tmp_path / "request.json"
    job.write_bytes(TypeAdapter(CompressRequest).dump_json(request))
    script = (
        "import sys; from pathlib import Path; from pydantic import TypeAdapter\n"
        "from workers.compression.process import carry_out\n"
        "from workers.compression.recipe import CompressRequest\n"
        "request = TypeAdapter(CompressRequest).validate_json(Path(sys.argv[1]).read_bytes())\n"
        "for line in carry_out(request): print(line, flush=True)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script, str(job)], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    starter.stdout.readline()
    children = [p for p in psutil.Process(starter.pid).children() if "workers.compression" in p.cmdline()]
    assert len(children) == 1
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    artifact_of(lines_of(request))


@pytest.mark.slow
def test_an_incompressible_model_is_reported(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = checkpoints.write_model(tmp_path / "other")
    (*_, last) = lines_of(request_for((folders[0], other), tmp_path / "work"))
    assert isinstance(last, Failed)
    assert "expected" in last.message


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (caused(CheckpointError("cannot read x"), OSError(errno.ESTALE, "Stale file handle")), True),
        (caused(AdapterError("x"), caused(ValueError("y"), MemoryError())), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (caused(CheckpointError("cannot read x"), PermissionError(errno.EACCES, "denied")), False),
        (OSError("x does not appear to have a file named config.json"), False),
        (CheckpointError("expected a config.json"), False),
        (AdapterError("not a fine-tune of the base"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("q_proj"), False),
    ],
)
def test_a_temporary_failure_allows_another_attempt(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes


@pytest.mark.slow
def test_a_disk_that_refuses_is_no_final_word(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Files limited in size, as by a full disk: the process ends without a last line, and then goes on."""
    request = request_for(folders, tmp_path / "work")
    request.folder.mkdir()
    job = request.folder / "request.json"
    job.write_bytes(TypeAdapter(CompressRequest).dump_json(request))

    def ended(limit: int) -> tuple[int, list[Line]]:
        process = subprocess.run(
            [sys.executable, "-m", "workers.compression", str(job)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
        )
        return process.returncode, [from_line(line) for line in process.stdout.decode().splitlines()]

    code, lines = ended(4096)
    assert code != 0
    assert all(isinstance(line, Progress) for line in lines), lines
    code, lines = ended(resource.RLIM_INFINITY)
    assert code == 0
    artifact_of(lines)
