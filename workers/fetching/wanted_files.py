"""Which files of a remote folder belong to its model or adapter, by the rules for local folders.

Pure decisions on names; the files that name others (an index, `delta.json`) are read from
the folder that is filled.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from profiler.errors import CheckpointError
from profiler.files import read_json
from profiler.model_files import CONFIG, SMALL_FILES, small_names
from profiler.variants.delta import DELTA, listed_files
from profiler.variants.odd_names import CONFIG as ADAPTER_CONFIG
from profiler.variants.odd_names import WEIGHTS as ADAPTER_WEIGHTS
from profiler.weight_files import INDEX, SINGLE, index_shards
from workers.fetching.messages import UNREADABLE, FetchError, Wanted

# The names to try where files cannot be listed. Shards and the files of a delta are named by others of these.
KNOWN_NAMES = (CONFIG, *SMALL_FILES, SINGLE, INDEX, ADAPTER_CONFIG, ADAPTER_WEIGHTS, DELTA)
SHOWN = 8


def first_files(names: Collection[str], wanted: Wanted) -> tuple[str, ...]:
    """The small files, and the file that names the weights' files, if there is one. Errors: FetchError."""
    small = small_names(names)
    match wanted:
        case Wanted.MODEL if SINGLE in names:
            return small
        case Wanted.MODEL if INDEX in names:
            return (*small, INDEX)
        case Wanted.ADAPTER if ADAPTER_CONFIG in names and ADAPTER_WEIGHTS in names:
            return (*small, ADAPTER_CONFIG)
        case Wanted.ADAPTER if DELTA in names:
            return (*small, DELTA)
    raise FetchError(UNREADABLE, _nothing(names, wanted))


def weights(names: Collection[str], wanted: Wanted, folder: Path) -> tuple[str, ...]:
    """The files with tensors; `folder` has the first files already. Errors: FetchError."""
    try:
        match wanted:
            case Wanted.MODEL:
                found = (SINGLE,) if SINGLE in names else index_shards(folder)
            case Wanted.ADAPTER if ADAPTER_CONFIG in names:
                found = (ADAPTER_WEIGHTS,)
            case Wanted.ADAPTER:
                found = tuple(
                    file.stored_name for file in listed_files(read_json(folder / DELTA), folder).values()
                )
    except CheckpointError as e:
        raise FetchError(UNREADABLE, str(e)) from e
    return found


def _nothing(names: Collection[str], wanted: Wanted) -> str:
    expected = {
        Wanted.MODEL: f"{SINGLE}, or {INDEX} with the files that it names",
        Wanted.ADAPTER: f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, or {DELTA}",
    }[wanted]
    shown = ", ".join(sorted(names)[:SHOWN]) or "no file"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"expected {expected}; found {shown}{more}; name a source with safetensors files"
