"""Documents from a user's file: paragraphs of plain text, or lines of JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import CheckpointError
from profiler.files import shown

MAX_FILE_BYTES = 2**28
MAX_WORD = 64
LINE = '{"text": "..."}, {"prompt": "...", "answer": "..."} or {"messages": [{"role": ..., "content": ...}]}'


@dataclass(frozen=True)
class Document:
    """A text, or the messages of a chat; `where` is its place for error messages."""

    where: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


def read_documents(path: Path, characters: int) -> list[Document]:
    """The documents of a .txt, .md or .jsonl file.

    Paragraphs of plain text are joined into documents of about `characters`; each line of .jsonl is a
    separate document. Raises CheckpointError, for .jsonl with the line's number.
    """
    if path.suffix not in (".txt", ".md", ".jsonl"):
        raise CheckpointError(f"expected a .txt, .md or .jsonl file of calibration texts, got {path}")
    text = _read(path)
    documents = _lines(text, path) if path.suffix == ".jsonl" else _joined(text, path, characters)
    if not documents:
        raise CheckpointError(f"{path} has no text; give typical texts of the model's requests")
    return documents


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"expected {path} to have at most {MAX_FILE_BYTES >> 20} MiB, got {size >> 20} MiB; give a "
                "sample of it (a few MB are enough)"
            )
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"expected {path} to be UTF-8, got byte {error.object[error.start]:#04x} at position "
            f"{error.start}; convert the file, for instance with iconv"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read the calibration texts {path}: {error.strerror}; check the path"
        ) from error


def _joined(text: str, path: Path, characters: int) -> list[Document]:
    documents: list[str] = []
    open_document = ""
    for paragraph in re.split(r"\n[ \t\r]*\n", text):
        for piece in _pieces(paragraph.strip("\r\n"), characters):
            open_document += ("\n\n" if open_document else "") + piece
            if len(open_document) >= characters:
                documents.append(open_document)
                open_document = ""
    if open_document:
        documents.append(open_document)
    return [Document(str(path), document) for document in documents]


def _pieces(paragraph: str, characters: int) -> list[str]:
    """Split a paragraph between words, if it is longer than a document; no pieces without text."""
    pieces: list[str] = []
    start = 0
    while len(paragraph) - start > characters:
        end = start + characters
        space = re.search(r"\s", paragraph[end : end + MAX_WORD])
        end += space.start() if space else 0
        pieces.append(paragraph[start:end])
        start = end
    return [piece for piece in (*pieces, paragraph[start:]) if piece.strip()]


def _lines(text: str, path: Path) -> list[Document]:
    lines = enumerate(text.split("\n"), start=1)
    return [_document(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _document(line: str, where: str) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected {LINE}, got invalid JSON: {error}") from error
    found = value if isinstance(value, dict) else {}
    if isinstance(found.get("text"), str):
        return Document(where, found["text"])
    if isinstance(found.get("prompt"), str) and isinstance(found.get("answer"), str):
        return Document(where, found["prompt"] + found["answer"])
    if _are_messages(found.get("messages")):
        return Document(where, messages=tuple(found["messages"]))
    raise CheckpointError(f"{where}: expected {LINE}, got {shown(value)}")


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) for m in value)
        and all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)
    )
