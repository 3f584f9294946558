"""Read a scenario file, with the same bounded loader as files of `ostinato plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from controlplane.simulation.forms import ScenarioForm
from placement.solver import scenario_file
from placement.solver.schema import ScenarioError, problems


def read(path: Path, policies: Sequence[str] = (), seeds: int | None = None) -> ScenarioForm:
    """The scenario of a YAML or JSON file; `policies` and `seeds`, if given, replace the file's.

    Raises ScenarioError, naming the field.
    """
    return form_of(scenario_file.read(path), policies, seeds)


def form_of(document: Any, policies: Sequence[str] = (), seeds: int | None = None) -> ScenarioForm:
    """Raises ScenarioError."""
    if not isinstance(document, dict):
        raise ScenarioError("expected an object with cluster, traffic and other fields")
    given = {"policies": list(policies)} if policies else {}
    if seeds is not None:
        given["seeds"] = seeds  # type: ignore[assignment]
    try:
        return ScenarioForm.model_validate(document | given)
    except ValidationError as error:
        raise ScenarioError(problems(error)) from error
