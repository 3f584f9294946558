"""What a file is that is not what its name says: told by its first bytes, for the message."""

from __future__ import annotations

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
FIRST_BYTES = 64  # that are enough to tell

_KINDS = (
    (LFS_POINTER, "a git-lfs pointer, a few lines of text that stand for the file"),
    (b"# xet version", "a git-xet pointer, a few lines of text that stand for the file"),
    (b"<!doctype html", "a web page about the file"),
    (b"<html", "a web page about the file"),
    (b"pk\x03\x04", "a zip archive, as torch.save writes it"),
    (b"gguf", "a GGUF file, as llama.cpp reads it"),
)
DOWNLOAD = "download the file itself (on Hugging Face its link has /resolve/ where the page's has /blob/)"
_DO = {
    LFS_POINTER: "run `git lfs pull` in its folder, or download the file itself",
    b"<!doctype html": DOWNLOAD,
    b"<html": DOWNLOAD,
    b"pk\x03\x04": "save the model again with save_pretrained(safe_serialization=True)",
    b"gguf": "download the model's original files, in safetensors format",
}


def lookalike(start: bytes) -> str | None:
    """What a file with these first bytes is, and what to do; None if nothing is known of them."""
    lower = start[:FIRST_BYTES].lstrip().lower()
    for mark, kind in _KINDS:
        if lower.startswith(mark.lower()):
            return f"is {kind}, and not the file itself; {_DO.get(mark, 'download the file itself')}"
    return None
