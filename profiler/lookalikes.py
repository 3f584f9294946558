"""What a file is that is not what its name says: told by its first bytes, for the message."""

from __future__ import annotations

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
FIRST_BYTES = 64  # that are enough to tell

_KINDS = (
    (LFS_POINTER, "a git-lfs pointer", "the note that git leaves in a file's place until git-lfs fetches it"),
    (b"# xet version", "a git-xet pointer", "the note that git leaves in a file's place"),
    (b"<!doctype html", "a web page", "as a browser's or wget's download of the page about the file"),
    (b"<html", "a web page", "as a browser's or wget's download of the page about the file"),
    (b"pk\x03\x04", "a zip archive", "as torch.save writes it"),
    (b"gguf", "a GGUF file", "as llama.cpp reads it"),
)
_DO = {
    LFS_POINTER: "run `git lfs pull` in its folder, or download the file itself",
    b"pk\x03\x04": "save the model again with save_pretrained(safe_serialization=True)",
    b"gguf": "download the model's original files, in safetensors format",
}


def lookalike(start: bytes) -> str | None:
    """What a file with these first bytes is, and what to do; None if nothing is known of them."""
    lower = start[:FIRST_BYTES].lstrip().lower()
    for mark, kind, what in _KINDS:
        if lower.startswith(mark.lower()):
            return f"is {kind}, {what}, and not the file; {_DO.get(mark, 'download the file itself')}"
    return None
