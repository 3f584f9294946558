"""The size of each package, and the imports between its parts: `python scripts/structure.py [CHECKOUT ...]`.

A room is a direct child of a package: a folder, or a module next to the folders. An arrow means that one room
(or module) imports another of the same package. Levels are the longest chain of arrows, a circle counting as
one. Arrows back up are those that would have to go for the circles to open. Only the files' text is read. For
two checkouts the last table compares both: the figures of the first, then of the second.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import permutations
from pathlib import Path

PACKAGES = ("controlplane", "workers", "placement", "profiler")
MAX_PERMUTED = 8  # parts of a circle of which every order is tried

Graph = dict[str, set[str]]

HEADER = (
    "package", "modules", "folders", "rooms", "room arrows", "back up", "room circles", "room levels",
    "module arrows", "module circles", "module levels",
)  # fmt: skip


def main(checkouts: list[Path]) -> None:
    for checkout in checkouts:
        graph = module_graph(checkout)
        print(f"{checkout}\n\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
        for package in PACKAGES:
            print(f"| `{package}/` | {' | '.join(map(str, figures(graph, package)))} |")
        print(f"\n{contracts(checkout)}\n")
    if len(checkouts) == 2:
        print(compared(*map(module_graph, checkouts)))


def compared(before: Graph, now: Graph) -> str:
    columns = [zip(figures(before, package), figures(now, package), strict=True) for package in PACKAGES]
    rows = [(HEADER[0], *(f"`{package}/`" for package in PACKAGES))]
    for name, *pairs in zip(HEADER[1:], *columns, strict=True):
        rows.append((name, *(f"{old} → {new}" for old, new in pairs)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def figures(graph: Graph, package: str) -> list[int]:
    modules = within(graph, lambda name: name.split(".")[0] == package)
    folders = {name.rpartition(".")[0] for name in modules if "." in name}
    rooms = grouped({name: found for name, found in modules.items() if name != package}, room)
    return [
        len(modules),
        len(folders),
        len(rooms),
        arrows(rooms),
        sum(backward(rooms, circle) for circle in circles(rooms)),
        len(circles(rooms)),
        levels(rooms),
        arrows(modules),
        len(circles(modules)),
        levels(modules),
    ]


def contracts(checkout: Path) -> str:
    text = (checkout / "pyproject.toml").read_text()
    linter = tomllib.loads(text)["tool"]["importlinter"]
    listed = [
        name
        for contract in linter["contracts"]
        for key in ("source_modules", "layers", "containers", "modules")
        for entry in contract.get(key, ())
        for name in entry.split("|")
    ]
    lines = sum(len(block.strip().splitlines()) for block in contract_blocks(text))
    return (
        f"Import contracts: {len(linter['contracts'])}, {lines} lines, naming {len(listed)} of our modules "
        f"and folders."
    )


def contract_blocks(text: str) -> Iterator[str]:
    for block in text.split("[[tool.importlinter.contracts]]")[1:]:
        yield block.split("\n[", 1)[0]


# --- from files to a graph ---


def module_graph(checkout: Path) -> Graph:
    files = {
        module_name(path.relative_to(checkout)): path
        for package in PACKAGES
        for path in sorted((checkout / package).rglob("*.py"))
    }
    return {name: set(imports(name, path, files)) - {name} for name, path in files.items()}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of ours that this one imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (found for alias in node.names if (found := nearest(alias.name, known)))
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, name, path)
            for alias in node.names:
                if found := nearest(f"{base}.{alias.name}", known):
                    yield found


def absolute(node: ast.ImportFrom, name: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    parent = package[: len(package) - node.level + 1]
    return ".".join([*parent, node.module] if node.module else parent)


def nearest(dotted: str, known: Mapping[str, Path]) -> str:
    """The module that a dotted name is, or is in; "" if it is none of ours."""
    while dotted and dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted


# Figures of a graph


def within(graph: Graph, inside: Callable[[str], bool]) -> Graph:
    return {name: set(filter(inside, found)) for name, found in graph.items() if inside(name)}


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def grouped(graph: Graph, group: Callable[[str], str]) -> Graph:
    rooms: Graph = {group(name): set() for name in graph}
    for name, found in graph.items():
        rooms[group(name)] |= {group(other) for other in found if other in graph}
    return {name: found - {name} for name, found in rooms.items()}


def arrows(graph: Graph) -> int:
    return sum(map(len, graph.values()))


def components(graph: Graph) -> list[list[str]]:
    """Strongly connected parts, each after those that it imports (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    parts: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            at = stack.index(name)
            parts.append(stack[at:])
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return parts


def circles(graph: Graph) -> list[list[str]]:
    return [part for part in components(graph) if len(part) > 1]


def levels(graph: Graph) -> int:
    """The longest chain of arrows, in parts; a circle is one part."""
    height: dict[str, int] = {}
    for part in components(graph):
        below = {other for name in part for other in graph[name]} - set(part)
        for name in part:
            height[name] = 1 + max((height[other] for other in below), default=0)
    return max(height.values(), default=0)


def backward(graph: Graph, circle: list[str]) -> int:
    """The fewest arrows of a circle that run against an order of its parts."""
    inner = within(graph, set(circle).__contains__)
    orders: Iterable[tuple[str, ...]] = (
        permutations(circle) if len(circle) <= MAX_PERMUTED else [tuple(by_arrows(inner))]
    )
    return min(against(inner, order) for order in orders)


def by_arrows(graph: Graph) -> list[str]:
    """An order of a large circle: those first that import little and are imported much."""
    imported = {name: sum(name in found for found in graph.values()) for name in graph}
    return sorted(graph, key=lambda name: (len(graph[name]) - imported[name], name))


def against(graph: Graph, order: tuple[str, ...]) -> int:
    place = {name: number for number, name in enumerate(order)}
    return sum(place[other] > place[name] for name, found in graph.items() for other in found)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or [Path()])
