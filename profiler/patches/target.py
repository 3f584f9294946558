"""Replaces a part of another package, after a check that the part is what the replacement expects.

Other packages promise nothing about these parts. So a target names the parameters that its replacement uses,
and the versions in which a developer read its source. A missing part raises `Moved`; no patch is left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

_OURS = "_ostinato_patch"
_ABSENT = object()


class Moved(RuntimeError):
    """A package lacks the part that a patch replaces, or the part takes other parameters."""


@dataclass(frozen=True)
class Target:
    """The function, method or class `name` ("function" or "Class.method") of `module`.

    `parameters` are those that the replacement uses, in their order. `read` has the digests of the sources
    that a developer read (`testkit.package_sources.digest`), by version.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    read: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def replace(self, make: Callable[[Any], Any], owner: Any = None) -> Callable[[], None]:
        """Put `make(target)` in the target's place; returns a function that puts the target back.

        `owner` is the class, module or object whose attribute is replaced; without it, the target's own.
        Raises Moved.
        """
        owner = self._owner() if owner is None else owner
        return self._put(make, owner, self._found(owner, self._attribute))

    def replace_once(self, make: Callable[[Any], Any], owner: Any = None) -> None:
        """The same as `replace`, for the rest of the owner's life. A second call changes nothing."""
        owner = self._owner() if owner is None else owner
        found = self._found(owner, self._attribute)
        if getattr(found, _OURS, None) != self.path:
            self._put(make, owner, found)
            setattr(getattr(owner, self._attribute), _OURS, self.path)

    def call_after(self, then: Callable[..., None], owner: Any = None) -> None:
        """Call `then(*arguments)` after each call of the target, which returns nothing. Otherwise as
        `replace_once`.
        """

        def make(inner: Callable[..., Any]) -> Callable[..., None]:
            @wraps(inner)
            def both(*args: Any, **kwargs: Any) -> None:
                inner(*args, **kwargs)
                then(*args, **kwargs)

            return both

        self.replace_once(make, owner)

    @property
    def _attribute(self) -> str:
        return self.name.rpartition(".")[2]

    def _put(self, make: Callable[[Any], Any], owner: Any, found: Any) -> Callable[[], None]:
        self._check(found)
        attribute = self._attribute
        own = vars(owner).get(attribute, _ABSENT)  # a method belongs to its class, not to the object
        made = make(found)
        setattr(owner, attribute, staticmethod(made) if isinstance(own, staticmethod) else made)

        def put_back() -> None:
            if own is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)

        return put_back

    def _owner(self) -> Any:
        try:
            owner: Any = importlib.import_module(self.module)
        except ImportError as e:
            raise Moved(self._expected(f"got {e!r}")) from e
        for part in self.name.split(".")[:-1]:
            owner = self._found(owner, part)
        return owner

    def _found(self, owner: Any, attribute: str) -> Any:
        found = getattr(owner, attribute, _ABSENT)
        if found is _ABSENT:
            raise Moved(self._expected(f"{owner!r:.100} has no {attribute}"))
        return found

    def _check(self, found: Any) -> None:
        if not self.parameters:
            return
        has = list(inspect.signature(found).parameters)
        rest = iter(has)
        if not all(parameter in rest for parameter in self.parameters):
            raise Moved(self._expected(f"its parameters are {', '.join(has) or 'none'}"))

    def _expected(self, got: str) -> str:
        takes = f" with the parameters {', '.join(self.parameters)}" if self.parameters else ""
        package = self.module.partition(".")[0]
        return (
            f"expected {self.path}{takes}, but {got}: this version of {package} is not supported; install"
            " a version that pyproject.toml names"
        )
