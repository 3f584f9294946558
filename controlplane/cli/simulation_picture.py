"""A picture of a simulated scenario: attainment, TTFT and TPOT against the rate, with a curve for each
policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controlplane import errors
from controlplane.cli.picture import drawing

Result = Mapping[str, Any]
_STYLES = ("o-", "s-", "^-", "D-", "v-", "P-", "X-", "*-", "<-", ">-", "h--", "d--")


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG. Errors: InvalidRequest when there are no rates to draw by, or the file cannot be
    written."""
    results: Sequence[Result] = document["results"]
    if any(result["ratePerS"] is None for result in results):
        raise errors.InvalidRequest(
            "--plot needs rates in the file's traffic, but there are none; add traffic.rates to the file",
            param="plot",
        )
    with drawing(path, (12, 4.5), panels=3) as (figure, panels):
        _panel(panels[0], results, "attainment (%)", lambda result: _scaled(result["attainment"]["all"], 100))
        _panel(
            panels[1],
            results,
            "TTFT, 99th percentile (s)",
            lambda result: _scaled(result["ttftS"]["p99"], 1),
        )
        _panel(
            panels[2],
            results,
            "TPOT, 99th percentile (ms)",
            lambda result: _scaled(result["tpotS"]["p99"], 1e3),
        )
        figure.suptitle(f"{document['name']}: mean of {document['seeds']} seeds, with 95% intervals")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))


def _panel(axes: Any, results: Sequence[Result], label: str, value: Callable[[Result], Any]) -> None:
    policies = list(dict.fromkeys(result["policy"] for result in results))
    for policy, style in zip(policies, _STYLES, strict=False):
        points = [(result["ratePerS"], value(result)) for result in results if result["policy"] == policy]
        points = [(rate, found) for rate, found in points if found is not None]
        rates = [rate for rate, _ in points]
        middle = [found["mean"] for _, found in points]
        below = [
            found["mean"] - (found["mean"] if found["low"] is None else found["low"]) for _, found in points
        ]
        axes.errorbar(rates, middle, yerr=below, fmt=style, markersize=5, capsize=3, label=policy)
    axes.set(xlabel="requests a second", ylabel=label)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.grid(alpha=0.3)


def _scaled(value: Mapping[str, Any] | None, factor: float) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: None if number is None else number * factor for name, number in value.items()}
