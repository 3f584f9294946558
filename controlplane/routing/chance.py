"""Random numbers and hashes for routers: the same seed gives the same choices. Compiled.

`splitmix64` (Steele, Lea and Flood, 2014) is used for both.
"""

from __future__ import annotations

import numpy as np

from profiler.compiled import Records, compiled, records

CHANCE = np.dtype([("state", "u8")], align=True)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def new_chance(seed: int) -> Records:
    """[1], a new generator."""
    made = records(CHANCE, 1)
    made.state = np.uint64(seed)
    return made


@compiled
def mixed(number: np.uint64) -> np.uint64:
    """A hash of 64 bits: every bit of the input changes half of the output's."""
    number = (number ^ (number >> _30)) * _FIRST
    number = (number ^ (number >> _27)) * _SECOND
    return number ^ (number >> _31)


@compiled
def pair(one: np.uint64, other: np.uint64) -> np.uint64:
    """A hash of two numbers that depends on their order."""
    return mixed(mixed(one + _STEP) + other)


@compiled
def uniform(chance: Records) -> float:
    """The next number in [0, 1)."""
    chance[0].state = np.uint64(chance[0].state) + _STEP
    return float(mixed(np.uint64(chance[0].state)) >> _11) / 9007199254740992.0


@compiled
def below(chance: Records, count: int) -> int:
    """The next number from 0 to `count` - 1."""
    return min(count - 1, int(uniform(chance) * count))
