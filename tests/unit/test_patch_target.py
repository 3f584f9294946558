"""A part of a package is replaced and comes back; a part that has moved is an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from profiler.patches.target import Moved, Target


class Owner:
    """A class of another package."""

    def method(self, first: int, second: int = 2) -> int:
        return first + second

    @staticmethod
    def static(first: int) -> int:
        return first


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ModuleType("a_package")
    made.Owner = type("Owner", (Owner,), {**vars(Owner)})  # type: ignore[attr-defined]
    made.function = lambda x: x  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_package", made)
    return made


def ten_more(inner: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: inner(*args) + 10


def target(name: str, *parameters: str) -> Target:
    return Target("a_package", name, parameters)


def test_a_method_is_replaced_and_comes_back(package: Any) -> None:
    owner = package.Owner()
    put_back = target("Owner.method", "first", "second").replace(ten_more)
    assert owner.method(1) == 13
    put_back()
    assert owner.method(1) == 3


def test_a_method_of_one_object_is_that_objects_only(package: Any) -> None:
    one, other = package.Owner(), package.Owner()
    put_back = target("Owner.method").replace(ten_more, one)
    assert (one.method(1), other.method(1)) == (13, 3)
    put_back()
    assert vars(one) == {}


def test_a_second_call_for_the_same_part_changes_nothing(package: Any) -> None:
    calls: dict[str, Callable[[], int]] = {
        "Owner.method": lambda: package.Owner().method(1),
        "Owner.static": lambda: package.Owner.static(3),
        "function": lambda: package.function(3),
    }
    for name, call in calls.items():
        target(name).replace_once(ten_more)
        target(name).replace_once(ten_more)
        assert call() == 13


def test_without_once_replacements_lie_on_each_other(package: Any) -> None:
    first, second = (target("function").replace(ten_more) for _ in range(2))
    assert package.function(0) == 20
    second()
    first()
    assert package.function(0) == 0


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("gone", (), "has no gone"),
        ("Gone.method", (), "has no Gone"),
        ("Owner.gone", (), "has no gone"),
        ("Owner.method", ("third",), "its parameters are self, first, second"),
        ("Owner.method", ("second", "first"), "its parameters are self, first, second"),
    ],
)
def test_a_moved_part_is_an_error_that_says_what_was_expected(
    package: Any, name: str, parameters: tuple[str, ...], said: str
) -> None:
    for replace in (target(name, *parameters).replace, target(name, *parameters).replace_once):
        with pytest.raises(Moved, match=f"expected a_package.{name}.*{said}.*version of a_package"):
            replace(ten_more)


def test_a_package_that_is_gone_is_one_too() -> None:
    with pytest.raises(Moved, match="No module named 'no_such_package'"):
        Target("no_such_package", "function").replace(ten_more)
