"""The measuring process, which says after each load which kinds of variants its steps computed.

    python counted_operations.py JOB.json

Every such line is MARK and the operations in JSON, with the number of layers that ran each of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from workers.measuring import __main__ as measuring
from workers.variants import operators

MARK = "operations "


def count_operations() -> None:
    """Have this process count. It measures inside the engine's own process."""
    calls: Counter[str] = Counter()
    add, rotate, measure_point = operators.add, operators.rotate, measuring.measure_point

    def counted_add(op: str, *given: Any) -> None:
        calls[op] += 1
        add(op, *given)

    def counted_rotate(*given: Any) -> Any:
        calls["boft"] += 1
        return rotate(*given)

    def told(measure: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any) -> Any:
            calls.clear()
            timing = measure(*given)
            print(MARK + json.dumps(calls), flush=True)
            return timing

        return measured

    vars(operators).update(add=counted_add, rotate=counted_rotate)
    vars(measuring)["measure_point"] = told(measure_point)


if __name__ == "__main__":
    count_operations()
    measuring.main()
