"""The loss of quality and the gain in loading of a compression, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from controlplane.cli.output import size

if TYPE_CHECKING:
    from workers.compression.request import Report


def report_facts(report: Report) -> Iterator[tuple[str, str]]:
    """A line for each task, each candidate of auto, and the packing of files."""
    for entry in report.quality:
        yield f"Quality, {entry['task']}", _quality(entry)
    for tried in report.tried:
        yield f"Tried {tried['name']}", _tried(tried)
    if report.lossless:
        yield "Lossless", _lossless(report.lossless)


def _quality(entry: Mapping[str, Any]) -> str:
    share = entry["unit"] == "points"
    before, after = (f"{100 * v:.1f}%" if share else f"{v:.4g}" for v in (entry["before"], entry["after"]))
    return f"{entry['metric']} {before} before, {after} after: lost {_loss(entry)}, {entry['items']} items"


def _loss(entry: Mapping[str, Any]) -> str:
    """A loss as text: 2.00 points (0.32 to 3.64)"""
    low, high = ("?" if entry[end] is None else f"{entry[end]:.2f}" for end in ("low", "high"))
    value = "without bound" if entry["value"] is None else f"{entry['value']:.2f}"
    return f"{value} {entry['unit']} ({low} to {high})"


def _tried(tried: Mapping[str, Any]) -> str:
    if tried["refused"]:
        return str(tried["refused"])
    held = size(tried["size_bytes"])
    if not tried["losses"]:
        return f"{held}; its loss was not measured, because it is not smaller"
    return f"{held}; " + "; ".join(f"{entry['task']} lost {_loss(entry)}" for entry in tried["losses"])


def _lossless(facts: Mapping[str, Any]) -> str:
    if not facts["files"]:
        return "no files to compress"
    rate = "measured" if facts["storage_measured"] else "as given"
    before, after = size(facts["size_before_bytes"]), size(facts["size_after_bytes"])
    return (
        f"{facts['compressed_files']} of {facts['files']} files compressed, {before} to {after}; "
        f"reading takes {facts['load_before_s']:.3g} s before and {facts['load_after_s']:.3g} s after, "
        f"from storage of {facts['storage_mb_per_s']:g} MB/s ({rate}), "
        f"decompressing {facts['decompressed_mb_per_s']:g} MB/s"
    )
