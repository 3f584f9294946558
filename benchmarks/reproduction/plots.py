"""What people want to look at: DeltaZip's mean latencies, SLOs and promises by rate; MaverIQ's latency."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot_style
from benchmarks.serving.metrics import PROMISES
from benchmarks.serving.workload import parse_case

Rows = Sequence[dict[str, Any]]


def draw(result: dict[str, Any], out: Path) -> None:
    """Beside `out`, with the same name, what of it there is."""
    figures = result["figures"]
    if "deltazip-11-13" in figures:
        deltazip(figures["deltazip-11-13"]["rows"], out.with_suffix(".png"))
    if "deltazip-promises" in figures:
        promises(figures["deltazip-promises"]["rows"], out.with_name(f"{out.stem}_promises.png"))
    if "maveriq-10" in figures:
        maveriq(figures["maveriq-10"]["rows"], out.with_suffix(".png"))


def deltazip(rows: Rows, path: Path) -> None:
    """The paper's testbed, variants loaded from disk: E2E above, TTFT below, a column for each popularity."""
    rows = [row for row in rows if row["testbed"] == "a800" and row["from"] == "disk"]
    popularities = _in_order(row["popularity"] for row in rows)
    figure, axes = plot_style.new(2, len(popularities), (4.2, 3.2), sharex=True)
    for line, (figures, title) in enumerate((("e2eS", "whole answer"), ("ttftS", "first token"))):
        for column, popularity in enumerate(popularities):
            axis = axes[line, column]
            for system in _in_order(row["system"] for row in rows):
                own = [row for row in rows if (row["system"], row["popularity"]) == (system, popularity)]
                rates = _in_order(row["rate"] for row in own)
                means = [_mean(row[figures]["mean"] for row in own if row["rate"] == rate) for rate in rates]
                axis.plot(rates, means, marker="o", label=system)
            _log(axis)
            axis.set_title(popularity if line == 0 else "")
            axis.set_xlabel("requests a second" if line == 1 else "")
            axis.set_ylabel(f"{title}, mean, s" if column == 0 else "")
    figure.suptitle("32 full fine-tunes of Llama-2-13B on four A800, loaded from disk, simulated")
    plot_style.legend(figure, axes)
    plot_style.save(figure, path)


def promises(rows: Rows, path: Path) -> None:
    """TTFT above, TPOT below, of 90% of requests, with both promises; a column for each popularity. Lines are
    simulated, the mean of the seeds; rings were served."""
    simulated = [(row, parse_case(row["case"])) for row in rows if "ttft_p90_s" in row]
    served = [(row, parse_case(row["served_case"])) for row in rows if "served_case" in row]
    figure, axes = plot_style.new(2, 2, (4.6, 3.2), sharex=True)
    engines = _in_order(row["engine"] for row, _ in simulated)
    for line, (name, title) in enumerate((("ttft_p90_s", "TTFT"), ("tpot_p90_s", "TPOT"))):
        for column, kind in enumerate(("uniform", "zipf")):
            axis = axes[line, column]
            for number, engine in enumerate(engines):
                own = [(row, case) for row, case in simulated if (row["engine"], case.kind) == (engine, kind)]
                rates = _in_order(case.rate for _, case in own)
                means = [_mean(row[name] for row, case in own if case.rate == rate) for rate in rates]
                axis.plot(rates, means, color=f"C{number}", label=engine)
                rings = [
                    (case.rate, row["measured"][name])
                    for row, case in served
                    if (row["served_as"], case.kind) == (engine, kind)
                ]
                axis.plot(
                    *zip(*rings, strict=True) if rings else ([], []), "o", mfc="none", color=f"C{number}"
                )
            for goals in PROMISES.values():
                axis.axhline(goals[line], color="0.6", linestyle=":")
            _log(axis)
            axis.set_title(kind if line == 0 else "")
            axis.set_xlabel("requests a second" if line == 1 else "")
            axis.set_ylabel(f"{title}, 90% within, s" if column == 0 else "")
    figure.suptitle("32 fine-tunes on an H200, simulated; rings: served")
    plot_style.legend(figure, axes)
    plot_style.save(figure, path)


def maveriq(rows: Rows, path: Path) -> None:
    """Median latency above, tokens a second below, a column for each trace."""
    rows = [row for row in rows if row["links"] == "pcie"]
    traces = _in_order(row["trace"] for row in rows)
    figure, axes = plot_style.new(2, len(traces), (4.6, 3.2), sharex=True)
    for column, trace in enumerate(traces):
        for system in _in_order(row["system"] for row in rows):
            own = [row for row in rows if (row["system"], row["trace"]) == (system, trace)]
            shares = _in_order(row["share"] for row in own)
            medians, tokens = [], []
            for share in shares:
                of_share = [row for row in own if row["share"] == share]
                medians.append(_mean(row["latency_s"]["p50"] for row in of_share))
                tokens.append(_mean(row["tokens_per_s"] for row in of_share))
            axes[0, column].plot(shares, medians, marker="o", label=system)
            axes[1, column].plot(shares, tokens, marker="o", label=system)
        axes[0, column].set_title(trace)
        axes[0, column].set_yscale("log")
        plot_style.plain_log(axes[0, column].yaxis)
        axes[1, column].set_xlabel("share of the trace's requests")
    axes[0, 0].set_ylabel("median latency, s")
    axes[1, 0].set_ylabel("tokens a second")
    figure.suptitle("Four LLMs on eight A6000s, simulated")
    plot_style.legend(figure, axes)
    plot_style.save(figure, path)


def _log(axis: Any) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    plot_style.plain_log(axis.xaxis, [0.5, 1, 2, 4, 8])
    plot_style.plain_log(axis.yaxis)


def _in_order(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else float("nan")
