"""Compresses one hidden layer: its linear layers in the order in which they run, then its other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch

from profiler.errors import AdapterError
from workers.compression.artefacts import Artefact, same
from workers.compression.durable import Entry, held
from workers.compression.layer_error import relative_error
from workers.compression.layout import at_layer, layer_tensors, linear_modules
from workers.compression.records import ModuleRecord, PartRecord, finite
from workers.compression.sources import Source
from workers.compression.types import Inputs, Method, Problem, Progress

See = Callable[[], Inputs | None]
"""Runs the block for a module's inputs; None when nothing is calibrated."""


class Blocks(Protocol):
    """The fine-tune's run over calibration texts, one hidden layer at a time (calibration/blocks.py)."""

    groups: tuple[tuple[str, ...], ...]

    def enter(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None: ...
    def inputs(self, modules: Sequence[str]) -> Inputs: ...
    def replace(self, module: str, weight: torch.Tensor) -> None: ...
    def leave(self) -> None: ...


@dataclass
class LayerContents:
    """The entries of a layer that must be written, and its records."""

    entries: dict[str, Entry] = field(default_factory=dict)
    modules: dict[str, ModuleRecord] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerCompressor:
    """Walks the layers of `base` and `tuned`, both of one architecture, in order.

    `blocks` is None without calibration: then all inputs count equally. `device` is where torch computes.
    """

    base: Source
    tuned: Source
    method: Method
    artefact: Artefact
    blocks: Blocks | None
    device: str

    def compress(self, layer: int, tell: Progress) -> LayerContents:
        """The layer's contents. Raises AdapterError with the module's name if the method cannot code a
        module.
        """
        found, modules = LayerContents(), linear_modules(self.base.spec)
        self._enter(layer)
        for number, (module, see) in enumerate(self._modules(modules)):
            tell(number / len(modules), f"{at_layer(self.base.spec, layer)}{module}")
            self._module(layer, module, see, found)
        if self.blocks is not None:
            self.blocks.leave()
        self._others(layer, modules, found)
        return found

    def replay(self, layer: int, record: PartRecord, folder: Path) -> None:
        """Run a layer that was finished before through the blocks, with its compressed weights."""
        if self.blocks is None:
            return
        self._enter(layer)
        at = at_layer(self.base.spec, layer)
        for name, module in record.modules.items():
            assert record.file is not None
            file = folder / record.file.name
            weight = self.artefact.restore(self._problem(name), module.facts, file)
            self.blocks.replace(name.removeprefix(at), weight)
        self.blocks.leave()

    def _enter(self, layer: int) -> None:
        if self.blocks is not None:
            spec, at = self.tuned.spec, at_layer(self.tuned.spec, layer)
            self.blocks.enter(layer, {name: self.tuned.tensor(f"{at}{name}") for name in layer_tensors(spec)})

    def _modules(self, modules: Sequence[str]) -> Iterator[tuple[str, See]]:
        """Each module, and a function for its inputs, given the current weights of the modules before it."""
        if self.blocks is None:
            yield from ((module, lambda: None) for module in modules)
            return
        left = set(modules)
        for group in self.blocks.groups:
            mine = [module for module in group if module in left]
            see = cache(partial(self.blocks.inputs, mine))  # once for the group, if any of it differs
            yield from ((module, see) for module in mine)
            left -= set(mine)
        if left:
            raise AdapterError(
                f"calibration cannot compute the inputs of {', '.join(sorted(left))} of "
                f"{self.base.spec.architecture}; use a method without calibration"
            )

    def _module(self, layer: int, module: str, see: See, found: LayerContents) -> None:
        name = f"{at_layer(self.base.spec, layer)}{module}"
        before, after = self.base.tensor(f"{name}.weight"), self.tuned.tensor(f"{name}.weight")
        if same(before, after):
            kept = self.artefact.unchanged(f"{name}.weight", after)
            found.entries |= {tensor: held(value) for tensor, value in kept.items()}
            found.whole |= {tensor: value.numel() * value.element_size() for tensor, value in kept.items()}
            return
        inputs = see()
        problem = Problem(name, self._wide(before), self._wide(after), inputs)
        dtype = before.dtype if before.element_size() < after.element_size() else after.dtype
        del before, after
        try:
            compressed = self.method.step(problem)
            stored = self.artefact.store(problem, compressed, dtype)
        except ValueError as error:
            raise AdapterError(f"{name} cannot be compressed: {error}") from error
        lost = finite(_relative_error(problem, stored.weight))
        found.modules[name] = ModuleRecord(stored.facts, compressed.size_bytes, lost)
        found.entries |= {tensor: held(value.cpu()) for tensor, value in stored.tensors.items()}
        if self.blocks is not None:
            self.blocks.replace(module, stored.weight)

    def _others(self, layer: int, modules: Sequence[str], found: LayerContents) -> None:
        """Add norms, biases, and all other tensors of a layer."""
        linear = {f"{module}.weight" for module in modules}
        for name in layer_tensors(self.base.spec):
            if name not in linear:
                kept = self.artefact.whole(f"{at_layer(self.base.spec, layer)}{name}")
                found.entries |= kept
                found.whole |= {tensor: entry.size_bytes for tensor, entry in kept.items()}

    def _problem(self, name: str) -> Problem:
        base, tuned = (self._wide(source.tensor(f"{name}.weight")) for source in (self.base, self.tuned))
        return Problem(name, base, tuned)

    def _wide(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().to(self.device)


def _relative_error(problem: Problem, weight: torch.Tensor) -> float:
    """Equation 1, relative to the base; without calibration the same for inputs that are all equal."""
    if problem.inputs is not None:
        return relative_error(problem, weight)
    whole = float(torch.linalg.vector_norm(problem.delta, dtype=torch.float64))
    lost = float(torch.linalg.vector_norm(weight - problem.tuned, dtype=torch.float64))
    return (lost / whole) ** 2
