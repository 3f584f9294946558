"""The demo's tasks: scoring, and the adapter folders that ship with them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from controlplane.demo.tasks import ADAPTERS, BASE, TASKS, Task, last_number, last_word


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ("84", "84"),
        ("  -7\n", "-7"),
        ("The answer is 1,204.", "1204"),
        ("12 + 30 = 42", "42"),
        ("007", "7"),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_the_last_number_is_found(reply: str, wanted: str) -> None:
    assert last_number(reply) == wanted


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [("mother", "mother"), ("She is his Mother-in-law.", "mother-in-law"), ("**Wife**", "wife"), ("42", "")],
)
def test_the_last_word_is_found(reply: str, wanted: str) -> None:
    assert last_word(reply) == wanted


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_score_counts_right_replies(task: Task) -> None:
    answers = [problem.answer for problem in task.problems]
    assert task.score(answers) == 1.0
    assert task.score([""] * len(answers)) == 0.0
    assert task.score([answers[0], *[""] * (len(answers) - 1)]) == pytest.approx(1 / len(answers))
    with pytest.raises(ValueError, match="zip"):
        task.score(answers[1:])


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_problems_ship_and_are_distinct(task: Task) -> None:
    assert len({problem.prompt for problem in task.problems}) == len(task.problems) == 12
    assert len({problem.answer for problem in task.problems}) > 1
    assert all(task.normalise(problem.answer) == problem.answer for problem in task.problems)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_adapter_is_a_plain_peft_folder(task: Task) -> None:
    config = json.loads((task.adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == BASE
    assert (config["bias"], config["modules_to_save"], config["use_dora"]) == ("none", None, False)
    header = _safetensors_header(task.adapter / "adapter_model.safetensors")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert len(header) == 30 * 2 * len(config["target_modules"])
    ranks = {min(tensor["shape"]) for tensor in header.values()}
    assert ranks == {config["r"]}


def test_adapters_differ_in_rank_and_modules_and_stay_small() -> None:
    configs = [json.loads((task.adapter / "adapter_config.json").read_text()) for task in TASKS.values()]
    assert len({config["r"] for config in configs}) == len(configs)
    assert len({tuple(config["target_modules"]) for config in configs}) == len(configs)
    assert sum(file.stat().st_size for file in ADAPTERS.rglob("*") if file.is_file()) <= 4_900_000


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header
