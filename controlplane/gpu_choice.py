"""Which of a node's GPUs are ours, as a setting says it: `0,1` of every node; by node: `a=0,1;b=none;2`."""

from __future__ import annotations

NONE = "none"


def gpus_of(text: str, node: str) -> tuple[int, ...] | None:
    """Indices of the GPUs of `node` that are ours, ascending; None: all. What names the node goes before
    what is for every node.

    Errors: ValueError for what is no such list.
    """
    lists: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, listed = part.rpartition("=")
        if name.strip() in lists or (equals and not name.strip()):
            raise _unreadable(text, f"each node once, and by its name, got {part!r}")
        lists[name.strip()] = _indices(text, listed)
    return lists.get(node, lists.get(""))


def _indices(text: str, listed: str) -> tuple[int, ...]:
    if listed.strip() == NONE:
        return ()
    parts = [part.strip() for part in listed.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise _unreadable(text, f"indices, got {listed!r}")
    return tuple(sorted({int(part) for part in parts}))


def _unreadable(text: str, expected: str) -> ValueError:
    return ValueError(f"cannot read {text!r}: expected {expected}; write it like 0,1 or a=0,1;b={NONE};2")
