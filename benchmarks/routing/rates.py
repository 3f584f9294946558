"""The largest rate at which a policy keeps its promises, by halving."""

from __future__ import annotations

from collections.abc import Callable


def largest_rate(keeps: Callable[[float], bool], guess: float, precision: float) -> float:
    """The largest rate that `keeps`, to a share of `precision`, where lower rates keep what higher ones do.

    The search begins around `guess` and widens until one rate keeps and one does not. 0 if none does down to
    a thousandth of the guess.
    """
    low, high = guess, guess * (1 + 4 * precision)
    step = 1 + 4 * precision
    if keeps(low):
        while keeps(high):
            low, high, step = high, high * step, step * step
    else:
        low, high = low / step, low
        while not keeps(low):
            if low < guess / 1000:
                return 0.0
            low, high, step = low / step / step, low, step * step
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
