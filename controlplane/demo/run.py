"""`ostinato demo`: the main job from an empty cluster to answers, reported as it happens, on its own cluster.

Base and both variants are asked at once, so one engine serves them in one batch. The cluster runs in a
temporary home and is deleted when the demo ends.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from controlplane.client.client import Client
from controlplane.demo import estimates
from controlplane.demo.tasks import ADAPTERS, BASE, TASKS, Problem, Task
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import DeploymentView, OperationView, RegisterModelRequest
from controlplane.runtime import local
from controlplane.settings import Settings

CONCURRENT = 6
PROBLEMS = 12


@dataclass(frozen=True)
class Answer:
    """One streamed answer. TPOT is the mean time per token after the first."""

    model: str
    text: str
    ttft_s: float
    tpot_s: float | None


def main() -> int:
    """Run the demo; 0 when everything answered and each variant beat the base at its task."""
    console = Console(highlight=False, soft_wrap=True, file=sys.stdout)
    start_s = time.perf_counter()
    with _cluster(console) as client:
        _register(console, client)
        _deploy(console, client)
        console.print("[bold]4. Estimated and measured times[/]")
        estimates.compare(console, client, BASE, (BASE, *TASKS))
        won = _ask(console, client)
    console.print(f"Done in {time.perf_counter() - start_s:.0f} s. The local cluster was stopped.")
    return 0 if won else 1


@contextmanager
def _cluster(console: Console) -> Iterator[Client]:
    """A cluster in a temporary home; models converted once are kept in the user's own home."""
    home = Path(tempfile.mkdtemp(prefix="ostinato-demo-"))
    models = Settings().home / "models"
    models.mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(models)
    settings = Settings(home=home, http_port=local.free_port(), allowed_roots=str(ADAPTERS))

    def tell(message: str) -> None:
        console.print(f"  {message}")

    console.print("[bold]1. A local Ray Serve cluster[/]")
    try:
        cluster = local.up(settings, tell)
        with Client(cluster.url) as client:
            yield client
    finally:
        console.print("[bold]Stopping[/]")
        local.down(settings, tell)
        shutil.rmtree(home, ignore_errors=True)


def _register(console: Console, client: Client) -> None:
    console.print(
        "[bold]2. Register a base model and two LoRA variants[/]  (measuring the base takes a minute or two)"
    )
    base = RegisterModelRequest(model=BASE, source=f"bundled://{BASE}")
    _follow(console, client, client.register_model(base))
    for task in TASKS.values():
        variant = RegisterModelRequest(model=task.name, base=BASE, adapter=str(task.adapter))
        _follow(console, client, client.register_model(variant))


def _deploy(console: Console, client: Client) -> None:
    console.print("[bold]3. Deploy them by intent[/]  (starting the engine takes about a minute on a CPU)")
    requests = [DeployModelRequest(model=BASE, intent="minLat", maxOutputLength=256)]
    requests += [DeployModelRequest(model=name, maxOutputLength=64) for name in TASKS]
    for request in requests:
        _follow(console, client, client.deploy_model(request))
    _print_plan(console, client.deployment(BASE))


def _follow(console: Console, client: Client, operation: OperationView) -> None:
    """Print each new phase and reason of an operation; raises the operation's error."""
    shown = 0
    for state in client.watch(operation.id):
        for event in state.events[shown:]:
            console.print(f"  {state.target}: {event.phase}, {event.message}")
        shown = len(state.events)
    client.wait(operation.id)


def _print_plan(console: Console, deployment: DeploymentView) -> None:
    plan = deployment.plan
    assert plan is not None
    console.print("[bold]The placement, and the reason for it[/]")
    for rank in plan.ranks:
        console.print(
            f"  rank {rank.rank}: layers {rank.layers[0]} to {rank.layers[1] - 1} on {rank.device} "
            f"of {rank.node}, {rank.memoryBytes / 2**30:.2f} GiB"
        )
    console.print(f"  {plan.reason}")
    console.print(f"  room for {plan.maxVariants} variants of rank {plan.maxLoraRank} or less in one batch")


def _ask(console: Console, client: Client) -> bool:
    console.print(
        f"[bold]5. Send requests to base and variants, {CONCURRENT} at a time[/]  (one engine, one batch)"
    )
    jobs = [
        (model, task, problem)
        for task in TASKS.values()
        for problem in task.problems[:PROBLEMS]
        for model in (BASE, task.name)
    ]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = list(pool.map(lambda job: _stream(client, *job), jobs))
    _print_latencies(console, answers)
    results = list(zip(jobs, answers, strict=True))
    won = [_print_task(console, task, results) for task in TASKS.values()]
    return all(won)


def _stream(client: Client, model: str, task: Task, problem: Problem) -> Answer:
    start_s = time.perf_counter()
    times, parts = [], []
    messages = [{"role": "user", "content": problem.prompt}]
    for part in client.chat_stream(model, messages, max_tokens=task.max_tokens, temperature=0):
        times.append(time.perf_counter())
        parts.append(part)
    ttft_s = (times[0] if times else time.perf_counter()) - start_s
    tpot_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return Answer(model, "".join(parts), ttft_s, tpot_s)


def _print_latencies(console: Console, answers: Sequence[Answer]) -> None:
    table = Table("model", "requests", "TTFT p50", "TPOT p50", title="", box=None, pad_edge=False)
    for model in (BASE, *TASKS):
        mine = [a for a in answers if a.model == model]
        ttft_s = statistics.median(a.ttft_s for a in mine)
        tpots_s = [a.tpot_s for a in mine if a.tpot_s is not None]
        tpot = f"{statistics.median(tpots_s) * 1000:.0f} ms" if tpots_s else "-"
        table.add_row(f"  {model}", str(len(mine)), f"{ttft_s * 1000:.0f} ms", tpot)
    console.print(table)


Job = tuple[str, Task, Problem]


def _print_task(console: Console, task: Task, results: Sequence[tuple[Job, Answer]]) -> bool:
    """Print one task's score and an example; True when the variant beat the base."""
    mine = [(job[2], answer) for job, answer in results if job[1] is task]
    score = {model: _right(task, mine, model) for model in (BASE, task.name)}
    console.print(f"[bold]{task.name}[/]: {task.description}")
    problem = mine[0][0]
    console.print(f"  for example: {' '.join(problem.prompt.split())}", markup=False)
    for model in (BASE, task.name):
        said = next(a.text for p, a in mine if p is problem and a.model == model)
        console.print(f"    {model} says: {' '.join(said.split())!r}", markup=False)
    console.print(
        f"  right answers to {PROBLEMS} held-out problems: base {score[BASE]}, variant {score[task.name]}"
    )
    return score[task.name] > score[BASE]


def _right(task: Task, answers: Sequence[tuple[Problem, Answer]], model: str) -> int:
    return sum(task.is_right(a.text, p.answer) for p, a in answers if a.model == model)


if __name__ == "__main__":
    sys.exit(main())
