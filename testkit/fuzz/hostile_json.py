"""Hostile JSON that tries to break its reader: values of the wrong type, size or depth, or no JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

# Text that `json.dumps` would not write stands as one of these until `written`.
RAW = {
    "@deep": "[" * 50_000 + "]" * 50_000,
    "@deeper": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "@unclosed": "[" * 100_000,
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@beyond": "1e999",
    "@digits": "9" * 5_000,
    "@many": "[" + "[]," * 3_000 + "[]]",
    "@surrogate": '"\\ud800"',
    "@pair": '"\\ud83d\\ude00"',
    "@nul": '"\\u0000"',
    "@lone": "\udc80",
    "@minus": "-0",
    "@comment": "1/**/",
}
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        64,
        1_024,
        4_096,
        2_000_000,
        2**31 - 1,
        2**31,
        2**40,
        2**53,
        2**63,
    ),
    *(2**64, -(2**63), 10**30, 0.0, 1.5, -0.5, 1e308, 1e-320),
    *("", "0", "none", "a" * 300, "é\u202e", "\x00", "../x", "/etc/passwd", "%s%n", "{x}", "x" * 20_000),
    *([], {}, [[]], [0], [-1, 2], [0, 2**64], [1] * 9, {"a": {}}, [None], ["q_proj"] * 3),
    *("F32", "F16", "BF16", "U8", "f32", "float32", "bfloat16", "layer-00000.safetensors", "(?i)[a-\uffff]"),
)


def hostile(random: Random) -> Any:
    return random.choice(VALUES) if random.random() < 0.7 else random.choice(list(RAW))


def mutated(value: Any, random: Random, changes: int = 1) -> Any:
    """A copy of a JSON value with some places in it changed."""
    value = json.loads(json.dumps(value))
    for _ in range(changes):
        value = _change(value, random)
    return value


def _change(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        return _change_object(value, random)
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return [_change(each, random) if i == place else each for i, each in enumerate(value)]
    return _near(value, random) if random.random() < 0.4 else hostile(random)


def _change_object(value: dict[str, Any], random: Random) -> dict[str, Any]:
    key = random.choice(list(value))
    match random.randrange(8):
        case 0:
            return {k: v for k, v in value.items() if k != key}
        case 1:
            other = random.choice([*value, "x", "", "\x00", "__metadata__", "@surrogate"])
            return {(other if k == key else k): v for k, v in value.items()}
        case 2:
            return {**value, key: value[random.choice(list(value))]}
        case 3:
            return {**value, random.choice(["extra", "é", "__metadata__", key.upper()]): hostile(random)}
        case 4:
            return {**value, f"@twice{key}": value[key]}
        case _:
            return {**value, key: _change(value[key], random)}


def _near(value: Any, random: Random) -> Any:
    """Another value, most often of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return random.choice(
                [value + 1, value - 1, -value, value * 2, value // 2, str(value), float(value)]
            )
        case str():
            return random.choice([value[:-1], value + "x", value.upper(), [value], value * 2, f" {value}"])
        case list():
            return random.choice([value * 2, value[::-1], {"a": value}, [*value, None]])
        case _:
            return [value]


def written(value: Any) -> bytes:
    """As bytes, with what stands for other text replaced by it."""
    text = json.dumps(value, ensure_ascii=False)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.replace('"@twice', '"').encode("utf-8", "surrogatepass")


def scratched(raw: bytes, random: Random) -> bytes:
    """Bytes with some of them changed, taken away or added."""
    at = random.randrange(len(raw) + 1)
    flipped = bytes([raw[at - 1] ^ (1 << random.randrange(8))]) if raw else b"{"
    made = (
        raw[:at],
        raw + random.randbytes(random.choice((1, 8, 100))),
        raw[:at] + random.randbytes(3) + raw[at + 3 :],
        b"",
        raw[:at] + raw[at + 1 :],
        b"\xef\xbb\xbf" + raw,
        raw.decode("latin-1").encode("utf-16"),
        raw[:at] + flipped + raw[at + 1 :],
    )
    return random.choice(made)
