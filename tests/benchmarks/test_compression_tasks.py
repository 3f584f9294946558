"""The tasks that fine-tunes are judged on have right answers, and tests that training does not show."""

from __future__ import annotations

import operator
import re

import pytest

from benchmarks.compression.tasks import task_named

DRAWN = ("arithmetic", "cipher", "sorting")
ORDERS = {"Add": "+", "Subtract": "-", "Multiply by": "*"}
COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def test_arithmetic_is_right_and_follows_the_prompt() -> None:
    for example in task_named("arithmetic").held_out(0, 300):
        value = int(re.findall(r"Start with (\d+)\.", example.prompt)[0])
        orders = re.findall(r"(Add|Subtract|Multiply by) (\d+)\.", example.prompt)
        expected = []
        for order, other in orders:
            sign = ORDERS[order]
            result = COMPUTE[sign](value, int(other))
            assert 0 <= result <= 9999
            expected.append(f"{value} {sign} {other} = {result}")
            value = result
        assert len(expected) == 4
        assert example.answer.splitlines() == expected


def transformed(text: str, order: str) -> str:
    if order == "reverse":
        return text[::-1]
    if order == "sort":
        return "".join(sorted(text))
    if order == "swap pairs":
        return re.sub("(.)(.)", r"\2\1", text)
    name, k = order.rsplit(" ", 1)
    if name == "rotate left by":
        return text[int(k) :] + text[: int(k)]
    assert name == "shift by"
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return text.translate(str.maketrans(alphabet, alphabet[int(k) :] + alphabet[: int(k)]))


def test_ciphers_are_right() -> None:
    for example in task_named("cipher").held_out(0, 300):
        orders, _, letters = example.prompt.strip().partition(": ")
        text = letters.replace(" ", "")
        for order in orders.lower().split(", then "):
            text = transformed(text, order)
        assert example.answer == " ".join(text)


def test_every_line_of_a_sort_has_one_letter_more_in_its_place() -> None:
    for example in task_named("sorting").held_out(0, 100):
        letters = example.prompt.strip().partition(": ")[2].split()
        lines = [line.split() for line in example.answer.splitlines()]
        assert lines[-1] == sorted(letters)
        for number, line in enumerate(lines, start=2):
            assert line == sorted(letters[:number]) + letters[number:]


@pytest.mark.parametrize("name", DRAWN)
def test_training_shows_nothing_of_the_test(name: str) -> None:
    task = task_named(name)
    tested = {example.prompt for example in task.held_out(0, 500)}
    assert tested.isdisjoint(example.prompt for example in task.train(0, 2000))
    assert task.held_out(0, 50) == task.held_out(3, 50)
    assert task.train(0, 50) == task.train(0, 50) != task.train(1, 50)


def test_facts_are_taught_again_and_again_in_new_orders() -> None:
    task = task_named("facts-40")
    rounds = [task.train(0, 100)[start : start + 40] for start in (0, 40)]
    table = set(rounds[0])
    assert len(table) == len({example.prompt for example in table}) == 40
    assert set(rounds[1]) == table
    assert rounds[0] != rounds[1]
    assert set(task.held_out(0, 500)) == table
    assert set(task.held_out(1, 500)).isdisjoint(table)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of arithmetic, .* got 'facts-0'"):
        task_named("facts-0")
