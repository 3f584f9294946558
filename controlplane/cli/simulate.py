"""simulate: a scenario in virtual time, computed by this process; nothing is deployed, and no requests are
sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane import errors
from controlplane.cli.output import print_json, print_table, print_text
from controlplane.cli.session import Json, session
from profiler.figures import figure


def simulate(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="A cluster, variants and traffic, as YAML (docs/simulation.md).")
    ],
    *,
    policy: Annotated[
        list[str] | None, typer.Option(help="A routing policy, in place of the file's; repeatable.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Number of seeds, in place of the file's.")
    ] = None,
    for_slo: Annotated[
        float | None, typer.Option(min=0, max=1, help="Find the fewest groups that reach this attainment.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write attainment and times by rate to this PNG.")] = None,
    json: Json = False,
) -> None:
    """Simulate traffic on a described cluster: attainment, latencies and cost, or the engines needed."""
    cli = session(ctx)
    if plot is not None and for_slo is not None:
        raise errors.InvalidRequest(
            "expected either --plot or --for-slo, got both; leave one of them out", param="plot"
        )
    document = _document(file, policy or [], seeds, for_slo)
    if plot is not None:
        from controlplane.cli.simulation_picture import draw

        draw(document, plot)
    if cli.json:
        print_json(document)
        return
    for engine in document.get("engines", ()):
        print_text(f"cluster.groups.{engine['group']}: {engine['why']}")
    if for_slo is None:
        print_table(RESULTS, map(_result, document["results"]), "nothing was simulated")
        for told in (line for result in document["results"] for line in _refusals(result)):
            print_text(told)
    else:
        for size in document["sizes"]:
            print_text(_size(size, for_slo))


RESULTS = (
    *("POLICY", "RATE", "GROUPS", "ATTAINMENT", "TTFT P50", "P99", "TPOT P50", "P99", "TOKENS/S", "COLD"),
    *("BUSY", "REFUSED", "LONGEST WAIT"),
)


def _document(file: Path, policies: list[str], seeds: int | None, for_slo: float | None) -> dict[str, Any]:
    from controlplane.cli.planned_groups import with_chosen_sizes
    from controlplane.settings import Settings
    from controlplane.simulation import reading
    from controlplane.simulation.simulate import simulate as simulated
    from placement.solver.schema import ScenarioError

    try:
        scenario = reading.read(file, policies, seeds)
        scenario, chosen = with_chosen_sizes(scenario, file.parent, Settings())
        return simulated(scenario, file.parent, for_slo) | ({"engines": chosen} if chosen else {})
    except ScenarioError as error:
        raise errors.InvalidRequest(f"{file}: {error}; see docs/simulation.md", param="file") from error


def _result(result: Mapping[str, Any]) -> tuple[str, ...]:
    refused = sum(entry["mean"] for entry in result["refused"].values())
    return (
        result["policy"],
        _rate(result),
        str(result["groups"]),
        _share(result["attainment"]["all"]),
        _ms(result["ttftS"]["p50"]),
        _ms(result["ttftS"]["p99"]),
        _ms(result["tpotS"]["p50"]),
        _ms(result["tpotS"]["p99"]),
        f"{result['tokensPerS']['mean']:,.0f}",
        _share(result["coldStarts"], interval=False),
        _share(result["utilisation"], interval=False),
        _share({"mean": refused / max(1.0, result["requests"]["mean"]), "low": None}),
        "-" if result["longestWaitS"] is None else f"{figure(result['longestWaitS']['mean'])} s",
    )


def _refusals(result: Mapping[str, Any]) -> Iterator[str]:
    """The reasons for unanswered requests."""
    reasons = {name: entry["mean"] for name, entry in result["refused"].items() if entry["mean"] > 0}
    if reasons:
        told = ", ".join(f"{name} {count:,.4g}" for name, count in reasons.items())
        yield f"{result['policy']} at {_rate(result)} left requests unanswered, on average: {told}"


def _size(size: Mapping[str, Any], wanted: float) -> str:
    of = f"{size['policy']} at {_rate(size)}"
    if size["groups"] is None:
        return f"{of}: none of the tried numbers of groups reaches {100 * wanted:g}%"
    fewer = "" if size["withOneLess"] is None else f"; one group fewer reaches {_share(size['withOneLess'])}"
    many = "1 group reaches" if size["groups"] == 1 else f"{size['groups']} groups reach"
    return f"{of}: {many} {100 * wanted:g}% ({_share(size['attainment'])}{fewer})"


def _rate(result: Mapping[str, Any]) -> str:
    return "as recorded" if result["ratePerS"] is None else f"{result['ratePerS']:g}/s"


def _share(value: Mapping[str, Any] | None, interval: bool = True) -> str:
    if value is None:
        return "-"
    text = f"{100 * value['mean']:.4g}%"
    spread = value["low"] if interval else None
    return text if spread is None else f"{text} +- {100 * (value['mean'] - spread):.2g}"


def _ms(value: Mapping[str, Any] | None) -> str:
    return "-" if value is None else f"{1e3 * value['mean']:,.3g} ms"
