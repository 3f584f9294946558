"""evaluate: run tasks on a deployed model, and store the figures with it; also formats figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane import errors
from controlplane.cli.output import print_json, print_table
from controlplane.cli.session import Json, session
from controlplane.cli.waiting import Progress, live_line

if TYPE_CHECKING:
    from controlplane.client.client import Client
    from controlplane.management.schemas.evaluations import EvaluationView
    from profiler.evaluation.results import Result
    from profiler.evaluation.tasks import Task
    from profiler.evaluation.types import Answerer

SHARES = {"exact_match": "exact match", "multiple_choice": "multiple choice"}
Answering = Callable[[str, str], "Answerer"]


def evaluate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A deployed model.")],
    tasks: Annotated[
        Path, typer.Argument(help="A .jsonl file of tasks, or a folder of such files (docs/evaluation.md).")
    ],
    *,
    reference: Annotated[
        str | None, typer.Option(help="A deployed model to measure KL from, such as the uncompressed model.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most this number of items of each task.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests to run at once.")] = 16,
    json: Json = False,
) -> None:
    """Measure a deployed model on tasks, store the results with the model, and show them."""
    cli = session(ctx)
    read = [task.first(limit) for task in _tasks(tasks)]
    kept: list[EvaluationView] = []
    with cli.client() as client, live_line(quiet=cli.json) as show:
        for name in filter(None, (model, reference)):
            client.model(name)  # reports a wrong name before any work
        answering = _answering(client, concurrency, show)
        for task in read:
            found = _measured(task, model, reference, answering)
            kept.extend(_keep(client, model, found))
    if cli.json:
        print_json({"model": model, "evaluations": kept})
        return
    print_table(COLUMNS, map(row, kept), empty="no tasks")


COLUMNS = ("TASK", "METRIC", "VALUE", "95% INTERVAL", "OF")


def row(view: EvaluationView) -> tuple[str, ...]:
    return view.task, metric(view), value(view), interval(view), counted(view)


def metric(view: EvaluationView) -> str:
    if view.metric != "kl":
        return SHARES.get(view.metric, view.metric)
    return f"KL from '{view.reference}'"


def value(view: EvaluationView) -> str:
    """The value. A KL without all of the reference's probability is a lower bound."""
    least = "at least " if view.metric == "kl" and view.coverage < 0.9995 else ""
    return f"{least}{_number(view, view.value)}"


def interval(view: EvaluationView) -> str:
    if view.low is None or view.high is None:
        return ""
    return f"{_number(view, view.low)} to {_number(view, view.high)}"


def counted(view: EvaluationView) -> str:
    tokens = f", {view.tokens} tokens" if view.tokens else ""
    told = f", {view.coverage:.1%} of the probability known" if view.metric == "kl" else ""
    return f"{view.items} items{tokens}{told}"


def evaluation_facts(views: Sequence[EvaluationView]) -> list[tuple[str, str]]:
    """One line for each evaluation, for a model's description."""
    return [("Quality" if i == 0 else " ", _sentence(view)) for i, view in enumerate(views)]


def _sentence(view: EvaluationView) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(view.measuredAt))
    within = f" ({interval(view)})" if interval(view) else ""
    return f"{view.task}: {metric(view)} {value(view)}{within}, {counted(view)}, {day}"


def _number(view: EvaluationView, number: float) -> str:
    if view.metric in SHARES:
        return f"{number:.1%}"
    return f"{number:.4g} nats" if view.metric == "kl" else f"{number:.5g}"


def _tasks(path: Path) -> tuple[Task, ...]:
    from profiler.errors import TaskError
    from profiler.evaluation.tasks import read_tasks

    try:
        return read_tasks(path)
    except TaskError as error:
        raise errors.InvalidRequest(f"{error}; see docs/evaluation.md", param="tasks") from error


def _answering(client: Client, concurrency: int, show: Progress) -> Answering:
    """A function that makes the answerer of a model for a task; the line shows its progress."""
    from controlplane.client.answerer import ApiAnswerer

    def make(name: str, task: str) -> Answerer:
        def told(done: int, of: int) -> None:
            if done * 20 // of > (done - 1) * 20 // of or done == of:  # every 5 percent only
                show(f"{task}: {done} of {of} answers of '{name}'")

        return ApiAnswerer(client, name, concurrency=concurrency, told=told)

    return make


def _measured(task: Task, model: str, reference: str | None, answering: Answering) -> list[Result]:
    from profiler.evaluation import evaluate as evaluating

    answerer = answering(model, task.name)
    with _scoring_errors(task):
        found = [evaluating.evaluate(task, answerer)]
        if reference is not None:
            other = answering(reference, task.name)
            found.append(evaluating.compare(task, answerer, other, reference))
    return found


@contextmanager
def _scoring_errors(task: Task) -> Iterator[None]:
    """Turn errors of scoring into InvalidRequest."""
    try:
        yield
    except ValueError as error:
        raise errors.InvalidRequest(f"{task.name}: {error}") from error


def _keep(client: Client, model: str, found: Sequence[Result]) -> list[EvaluationView]:
    """Store the results; returns them as the server now has them."""
    from controlplane.management.schemas.evaluations import EvaluationForm

    forms = [EvaluationForm.of(result) for result in found]
    subjects = [(form.task, form.metric, form.reference) for form in forms]
    kept = {(view.task, view.metric, view.reference): view for view in client.keep_evaluations(model, forms)}
    return [kept[subject] for subject in subjects]
