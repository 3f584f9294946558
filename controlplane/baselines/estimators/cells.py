"""Parsers of one cell of a table to one value. Each function raises ValueError saying what was expected."""

from __future__ import annotations

import math
import re

FAILED = frozenset(
    (
        *("", "-", "--", "x", "nan", "na", "n/a", "none", "null", "inf", "-inf"),
        *("oom", "out of memory", "outofmemory", "error", "fail", "failed", "killed"),
        *("timeout", "timed out", "crash", "crashed"),
    )
)
TRUE = frozenset(["true", "t", "yes", "y", "1", "1.0", "on"])
FALSE = frozenset(["false", "f", "no", "n", "0", "0.0", "off", ""])
DTYPES = {
    **dict.fromkeys(["fp16", "half", "float16", "torch.float16"], "float16"),
    **dict.fromkeys(["bf16", "bfloat16", "torch.bfloat16"], "bfloat16"),
    **dict.fromkeys(["int8", "w8a16", "8bit"], "int8"),
    **dict.fromkeys(["int4", "w4a16", "4bit"], "int4"),
    **dict.fromkeys(["int4_gptq", "gptq", "gptq4", "int4gptq", "gptq_int4"], "int4_gptq"),
}
MAX_RANKS = 4096
MAX_LAYERS = 4096
MAX_COUNT = 10**7


def failure(cell: str) -> str | None:
    """The reason why a latency cell holds no measurement, or None when it should be a number."""
    text = " ".join(cell.strip().strip("'\"").lower().split())
    if text in FAILED or "out of memory" in text or text.startswith("oom"):
        return text or "empty"
    try:
        number = float(text)
    except ValueError:
        return None
    if math.isnan(number) or math.isinf(number):
        return text
    return "not positive" if number <= 0 else None


def count(cell: str, maximum: int = MAX_COUNT) -> int:
    """A whole number of at least 1, also when written as 8.0."""
    try:
        number = float(cell.strip().strip("'\""))
    except ValueError:
        number = math.nan
    if not 1 <= number <= maximum or number != int(number):  # NaN fails the first
        raise ValueError(f"expected a whole number from 1 to {maximum}")
    return int(number)


def positive(cell: str) -> float:
    number = _number(cell)
    if number is None or number <= 0:
        raise ValueError("expected a positive number")
    return number


def optional(cell: str) -> float | None:
    """A number of at least 0; None for an unmeasured cell."""
    if failure(cell) not in (None, "not positive"):
        return None
    number = _number(cell)
    if number is None:
        raise ValueError("expected a number or an empty cell")
    return number if number >= 0 else None


def flag(cell: str) -> bool:
    text = cell.strip().strip("'\"").lower()
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise ValueError("expected True or False")


def layer_map(cell: str) -> tuple[int, ...]:
    """Layers per stage: "10 22", "[10, 22]", "10-22", "'10 22'" and the like."""
    text = cell.strip().strip("[](){}'\"").strip()
    if text.startswith("-") or re.search(r"\.\d*[1-9]", text):
        raise ValueError("expected whole numbers of layers, one per stage")
    parts = re.findall(r"[^\s,;:|/_\-\[\](){}'\"]+", re.sub(r"(?<=\d)\.0*(?=\D|$)", "", cell))
    if not parts:
        raise ValueError("expected the layers of each stage, such as '10 22'")
    try:
        return tuple(count(part, MAX_LAYERS) for part in parts)
    except ValueError as error:
        raise ValueError(f"expected whole numbers of layers from 1 to {MAX_LAYERS}, one per stage") from error


def model_name(cell: str) -> str:
    """Lower case, without the "-2layer" that names a fingerprint's own folder."""
    name = re.sub(r"[-_]\d+[-_]?layers?$", "", cell.strip().strip("'\"").strip().lower())
    if not name:
        raise ValueError("expected the name of a model")
    return name


def dtype(cell: str) -> str:
    name = cell.strip().strip("'\"").strip().lower().replace("-", "_")
    if not name:
        raise ValueError("expected a number format, such as float16 or int8")
    return DTYPES.get(name, name)


def _number(cell: str) -> float | None:
    try:
        number = float(cell.strip().strip("'\""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None
