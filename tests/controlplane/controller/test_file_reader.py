"""The process that reads files for the controller: its answers, its limits, its ends."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.controller import file_reader
from controlplane.controller.child_process import ReaderDied
from controlplane.controller.file_reader import FileReader
from controlplane.controller.reading import ReadLimits
from controlplane.controller.registration import Limits, read_model_files
from controlplane.state.records import Model, Phase
from testkit.controlplane.builders import base, no_bundles, ready_base, variant


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    reader = FileReader()
    yield reader
    reader.close()


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose header is as wide as allowed, and full of objects."""
    header = b'{"a":{"shape":[' + b"[]," * 400_000 + b"[]]}}"
    folder = tmp_path / "base"
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 12,'
        ' "num_attention_heads": 3, "intermediate_size": 20, "vocab_size": 40, "max_position_embeddings": 64}'
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return tmp_path


def test_the_reading_process_reads_like_this_process(reader: FileReader, files: Path) -> None:
    limits, ready = Limits((files,), 16), ready_base(files)
    assert reader.read_now(base(files), None, limits, no_bundles) == ready
    asked = variant(files, "v1")
    assert reader.read_now(asked, ready, limits, no_bundles) == read_model_files(
        asked, ready, limits, no_bundles
    )


@pytest.mark.parametrize("folder", ["missing", "torn", "nan", "wide", "strange", "../outside"])
def test_the_reading_process_refuses_like_this_process(reader: FileReader, files: Path, folder: str) -> None:
    asked, ready, limits = variant(files, folder), ready_base(files), Limits((files,), 16)
    with pytest.raises(errors.OstinatoError) as expected:
        read_model_files(asked, ready, limits, no_bundles)
    with pytest.raises(type(expected.value)) as found:
        reader.read_now(asked, ready, limits, no_bundles)
    assert found.value.body() == expected.value.body()


def test_a_bundled_model_is_converted_here(reader: FileReader, files: Path) -> None:
    asked: list[str] = []

    def convert(name: str) -> Path:
        asked.append(name)
        return files / "base"

    bundled = Model("b", 1, Phase.PROFILING, source="bundled://smollm2-135m-instruct")
    assert reader.read_now(bundled, None, Limits((), 16), convert).path == str(files / "base")
    assert asked == ["smollm2-135m-instruct"]


def test_one_process_reads_one_after_the_other(reader: FileReader, files: Path) -> None:
    for _ in range(3):
        reader.read_now(base(files), None, Limits((files,), 16), no_bundles)
        assert len(reader._idle) == 1
    assert reader._idle[0].reads >= 3


def test_a_read_beyond_the_memory_limit_is_an_error(wide: Path) -> None:
    """The next request has another process, and the whole memory limit."""
    reader = FileReader(ReadLimits(memory_bytes=16 << 20))
    with pytest.raises(errors.SourceUnreadable, match="more than the allowed 16 MiB of memory") as refusal:
        reader.read_now(base(wide), None, Limits((wide,), 16), no_bundles)
    assert refusal.value.param == "source"
    assert reader._idle == []
    reader.limits = ReadLimits()
    with pytest.raises(errors.SourceUnreadable, match=r"impossible shape|dtype"):
        reader.read_now(base(wide), None, Limits((wide,), 16), no_bundles)
    reader.close()


def test_a_read_beyond_the_time_limit_is_killed(files: Path) -> None:
    reader = FileReader(ReadLimits(wall_s=0.0))
    with pytest.raises(ReaderDied, match="longer than allowed"):
        reader.read_now(base(files), None, Limits((files,), 16), no_bundles)
    assert reader._idle == []


def test_a_read_beyond_the_cpu_limit_is_killed(files: Path) -> None:
    """The process ends by the signal that the kernel sends beyond the limit."""
    reader, limits = FileReader(ReadLimits(cpu_s=7)), Limits((files,), 16)
    reader.read_now(base(files), None, limits, no_bundles)
    process = reader._idle[0]._process
    allowed = _soft_limits(process.pid)
    assert 7 <= allowed["Max cpu time"] <= 7 + 60
    assert (1 << 30) < allowed["Max address space"] < (2 << 30)
    assert allowed["Max open files"] == 64
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGXCPU)
    going_on = threading.Thread(target=lambda: _go_on(reader, process))
    going_on.start()
    with pytest.raises(ReaderDied, match="more CPU time than allowed"):
        reader.read_now(base(files), None, limits, no_bundles)
    going_on.join()


def _go_on(reader: FileReader, process: subprocess.Popen[bytes]) -> None:
    """Once it was taken to read: the signal that waits for it is the first thing it sees."""
    while reader._idle:
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)


def _soft_limits(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {line[:26].strip(): int(line[26:].split()[0]) for line in lines if line[26:].split()[0].isdigit()}


def test_a_reading_process_that_was_killed_while_idle_is_replaced(files: Path) -> None:
    reader, limits = FileReader(), Limits((files,), 16)
    first = reader.read_now(base(files), None, limits, no_bundles)
    killed = reader._idle[0]
    os.kill(killed._process.pid, signal.SIGKILL)
    killed._process.wait()
    assert reader.read_now(base(files), None, limits, no_bundles) == first
    assert reader._idle != [killed]
    reader.close()


def test_the_reading_process_ends_with_its_input(files: Path) -> None:
    """The input ends as if the controller were killed."""
    reader = FileReader()
    reader.read_now(base(files), None, Limits((files,), 16), no_bundles)
    process = reader._idle[0]._process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_the_reading_process_has_no_secrets(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_API_KEY", "s3cret")
    reader = FileReader()
    reader.read_now(base(files), None, Limits((files,), 16), no_bundles)
    environ = Path(f"/proc/{reader._idle[0]._process.pid}/environ").read_bytes()
    assert b"PYTHONPATH=" in environ
    assert b"s3cret" not in environ
    reader.close()


def test_several_readings_run_at_once(files: Path) -> None:
    reader, limits, found = FileReader(), Limits((files,), 16), list[Model]()
    threads = [
        threading.Thread(target=lambda: found.append(reader.read_now(base(files), None, limits, no_bundles)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [ready_base(files)] * 3
    assert len(reader._idle) == file_reader.IDLE
    reader.close()


def test_a_file_that_is_read_whole_extends_the_limit(files: Path) -> None:
    """A second of CPU time, and no wall-clock time at all, but for the bytes that it says it reads."""
    assert ReadLimits(wall_s_per_mib=2.0).wall_s_for(3 << 20) == 6.0
    limits = replace(ReadLimits(), cpu_s=1, cpu_s_per_mib=1e6)
    reader, asked = FileReader(limits), variant(files, "v1")
    assert reader.read_now(asked, ready_base(files), Limits((files,), 16), no_bundles).phase is Phase.READY
    reader.close()
