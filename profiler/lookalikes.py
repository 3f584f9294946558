"""What a misnamed file really is, by its first bytes, for the error message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profiler import advice

FIRST_BYTES = 64  # enough to recognise the kind


def _of_adapter(path: Path) -> bool:
    return path.name.startswith("adapter_")


def _pull(path: Path) -> str:
    return (
        f"download it again with {advice.download(path.parent, of_adapter=_of_adapter(path))}, or run `git "
        f"lfs install` and `git lfs pull` in {path.parent}"
    )


def _download(path: Path) -> str:
    return (
        "download the real file with "
        f"{advice.download(path.parent, path.name, of_adapter=_of_adapter(path))}, or from the link with "
        "/resolve/ instead of /blob/"
    )


def _safetensors(path: Path) -> str:
    return f"save the model again with save_pretrained, which writes {path.name} in safetensors format"


def _original(path: Path) -> str:
    return f"download the model's original files, in safetensors format: {advice.download(path.parent)}"


_KINDS: tuple[tuple[bytes, str, Callable[[Path], str]], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a git-lfs pointer (a few lines of text in place of the data), because it was cloned without git-lfs",
        _pull,
    ),
    (b"# xet version", "a git-xet pointer (a few lines of text in place of the data)", _download),
    (b"<!doctype html", "a web page about it", _download),
    (b"<html", "a web page about it", _download),
    (b"pk\x03\x04", "a zip archive, as torch.save writes it", _safetensors),
    (b"gguf", "a GGUF file, as llama.cpp reads it", _original),
)


def lookalike(start: bytes, path: Path) -> str | None:
    """What kind of file the first bytes show, and what to do; None if the bytes show nothing."""
    lower = start[:FIRST_BYTES].lstrip().lower()
    for mark, kind, what_to_do in _KINDS:
        if lower.startswith(mark):
            return f"{path} is not the real file but {kind}; {what_to_do(path)}"
    return None
