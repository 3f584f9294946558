"""Numbers formatted for people."""

from __future__ import annotations

from decimal import Decimal

SMALLEST = 1e-4  # below it, an exponent is shorter than the zeros


def figure(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits; large numbers have no exponent: 9052.4 is 9050."""
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):f}" if SMALLEST <= abs(value) < float("inf") else text


def objective_text(value: float, unit: str, input_tokens: int, output_tokens: int) -> str:
    """What was minimised, in words, and for which request. Seconds are those of one whole answer."""
    said = f"{figure(value, 4)} {unit}"
    if not output_tokens:
        return f"{said} to a whole answer" if unit == "s" else said
    return f"{said} for an answer of {output_tokens} tokens to a prompt of {input_tokens}"
