"""A broken torch or torchvision is named before it breaks something else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.runtime import local
from controlplane.settings import Settings
from testkit.redis_server import free_port
from workers.engine import torch_check


@pytest.fixture(autouse=True)
def _names_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_check, "COMPANIONS", ("ostinato_vision", "ostinato_audio"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in torch_check.COMPANIONS:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_absent_companions_are_fine() -> None:
    torch_check.check()


def test_companions_that_import_are_fine(tmp_path: Path) -> None:
    (tmp_path / "ostinato_vision.py").write_text("")
    torch_check.check()


def test_a_torch_without_its_libraries_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build, where CUDA is not installed."""
    monkeypatch.setattr(torch_check, "TORCH", "ostinato_torch")
    said = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    (tmp_path / "ostinato_torch.py").write_text(f"raise ImportError({said!r})")
    with pytest.raises(torch_check.BrokenTorchStack) as broken:
        torch_check.check()
    assert said in str(broken.value)
    assert "index with CPU builds" in str(broken.value)


def test_a_broken_companion_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "ostinato_vision.py").write_text("raise RuntimeError('operator nms does not exist\\nmore')")
    (tmp_path / "ostinato_audio.py").write_text("raise OSError")
    with pytest.raises(torch_check.BrokenTorchStack) as broken:
        torch_check.check()
    message = str(broken.value)
    assert "operator nms does not exist)" not in message
    assert "operator nms does not exist, " in message
    assert "pip uninstall -y ostinato_vision ostinato_audio" in message


@pytest.mark.slow
def test_up_reports_a_broken_torch_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state after `pip install 'ostinato[cpu]'`, which brings a torchvision for CUDA."""
    monkeypatch.setattr(torch_check, "COMPANIONS", ("torchvision",))
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    home = tmp_path / "home"
    with pytest.raises(errors.Unavailable, match="run `pip uninstall -y torchvision`"):
        local.up(Settings(home=home, http_port=free_port(), engine="vllm"), lambda message: None)
    assert not home.exists()
