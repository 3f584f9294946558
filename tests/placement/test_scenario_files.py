"""What-if files with anything in them: refused by the field's name or decided, soon and in little memory."""

from __future__ import annotations

import copy
import functools
import math
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from placement.solver import scenario_file
from placement.solver.policies.joint import Joint
from placement.solver.schema import ScenarioError, read_scenario
from placement.solver.whatif import what_if

EVERY_FIELD: dict[str, Any] = {
    "cluster": {
        "nodes": [
            {
                "name": "a",
                "gpus": [{"type": "A6000", "count": 2, "total_gib": 48, "free_gib": 20, "load": 0.5}],
                "links": [[0, 1]],
            },
            {"name": "b", "gpus": [{"type": "mine", "count": 1, "total_gib": 16}]},
        ],
        "types": {"mine": {"memory_gb_per_s": 300, "tflops": 50, "shared": False}},
        "links": {"fast_gb_per_s": 100, "node_gb_per_s": 25, "network_gb_per_s": 12.5},
    },
    "deployments": [
        {
            "name": "m",
            "copies": 2,
            "model": {
                "layers": 4,
                "heads": 8,
                "kv_heads": 4,
                "hidden_size": 512,
                "dtype_bytes": 2,
                "layer_mib": 100,
                "kv_bytes_per_token_per_layer": 2048,
                "embedding_mib": 10,
                "head_mib": 10,
                "tied": False,
                "tables_everywhere": False,
                "layer_gflops_per_token": 0.2,
                "overhead_mib": 100,
                "last_overhead_mib": 10,
                "compressions": {"int4": {"accuracy": 0.85, "share": 0.25}},
            },
            "intent": "minCost",
            "cost": "memoryLatency",
            "slos": {"latency_s": 60, "ttft_s": 10, "tpot_s": 1, "cost": 1e6, "accuracy": 0.5},
            "rate_per_s": 0.5,
            "input_tokens": 64,
            "output_tokens": 32,
            "concurrency": 4,
            "max_tp": 4,
            "max_pp": 4,
            "headroom": 0.05,
            "anti_affinity": "gpu",
            "group": "g",
        }
    ],
}
Way = tuple[str | int, ...]


def ways(value: Any, way: Way = ()) -> Iterator[Way]:
    """The paths to every value in a document, lists and maps too."""
    yield way
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from ways(entry, (*way, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from ways(entry, (*way, index))


WAYS = tuple(way for way in ways(EVERY_FIELD) if way)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([1e300, -1e300, 1e-300, 5e-324, 2**63, 10**9, 10**21, 0, -0.0, 1, 1e-3]),
    st.text(max_size=8),
    st.lists(st.integers(-2, 3), max_size=3),
    st.dictionaries(st.sampled_from(["layers", "config", "x"]), st.integers(-1, 3), max_size=2),
)


def put(document: Any, way: Way, value: Any) -> None:
    for step in way[:-1]:
        document = document[step]
    document[way[-1]] = value


def test_the_document_itself_is_taken() -> None:
    cluster, requests = read_scenario(EVERY_FIELD, Path())
    assert (cluster.gpu_count, len(requests)) == (3, 2)
    assert len(what_if(cluster, requests, Joint()).placed) == 2


@pytest.mark.slow
@given(way=st.sampled_from(WAYS), value=ODD)
def test_any_value_anywhere_is_refused_by_name_or_decided(way: Way, value: Any) -> None:
    document = copy.deepcopy(EVERY_FIELD)
    put(document, way, value)
    refusal = refused_or_decided(document)
    # A field that only has to agree with another is named by its neighbours or by what holds them.
    named = [step for step in way if isinstance(step, str)][-2:]
    assert not refusal or any(step in refusal for step in named), f"{way} = {value!r}: {refusal}"


def refused_or_decided(document: Any) -> str:
    """Why it was refused; nothing where it was taken, and a decision made."""
    try:
        cluster, requests = read_scenario(document, Path())
    except ScenarioError as error:
        return str(error)
    what_if(cluster, requests[:2], Joint())
    return ""


@given(way=st.sampled_from(WAYS), value=ODD)
def test_text_is_read_as_it_is_written(way: Way, value: Any) -> None:
    document = copy.deepcopy(EVERY_FIELD)
    put(document, way, value)
    text = yaml.safe_dump(document, allow_unicode=True)
    try:
        read = scenario_file.parse(text)
    except ScenarioError:
        assert isinstance(value, str)  # characters that YAML has no place for
    else:
        got = functools.reduce(operator.getitem, way, read)
        assert same(got, value), f"{value!r} became {got!r}"


def same(got: Any, value: Any) -> bool:
    """Integers of many digits become decimal numbers; so does text like `1e3`, which YAML 1.1 leaves bare."""
    if isinstance(value, str):
        return got == value or str(got) == str(float(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(got) == float(value) or (math.isnan(got) and math.isnan(value))
    return bool(got == value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 5_000 + "]" * 5_000, "at most 32 levels of lists and maps"),
        ("{a: " * 200_000, "at most 32 levels of lists and maps"),
        ("[" + "1," * 400_000 + "]", "at most 40000 values"),
        (
            "a: &a [1, 1]\n" + "\n".join(f"k{n}: &k{n} [*a, *a]" for n in range(30_000)),
            "at most 40000 values",
        ),
        ("&a [*a]", "contains itself"),
        ("a: 1\nb: 2\na: 3", "line 3: 'a' is given twice"),
        ("a: [", "expected a YAML file"),
        ("a: 1\n---\nb: 2", "line 2: but found another document"),
        ("!!python/object/apply:os.getcwd []", "expected a YAML file"),
        ("a: !!int " + "9" * 5_000, "expected a YAML file"),
        ("a: \0", "expected a YAML file"),
    ],
    ids=lambda text: text[:12] if isinstance(text, str) else None,
)
def test_unusable_yaml_is_refused(text: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        scenario_file.parse(text)


def test_names_are_text_and_numbers_are_decimal() -> None:
    text = "{a: 2020-13-45, b: 1:30, c: no, d: 1e3, e: 007, f: .inf, g: ~, h: true}"
    expected = {
        **{"a": "2020-13-45", "b": "1:30", "c": "no", "d": 1000.0},
        **{"e": 7, "f": float("inf"), "g": None, "h": True},
    }
    assert scenario_file.parse(text) == expected


def test_aliases_and_merges_stand_for_what_they_name() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]"
    assert scenario_file.parse(text) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "large").write_text("x" * (scenario_file.MAX_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none", "No such file"), ("large", "at most 1000000 bytes"), ("binary", "YAML file")):
        with pytest.raises(ScenarioError, match=said):
            scenario_file.read(tmp_path / name)
    with pytest.raises(ScenarioError, match="at most 1000000 bytes"):
        scenario_file.read(Path("/dev/zero"))


READ = """
import resource, sys, time
from pathlib import Path
from placement.solver import scenario_file
from placement.solver.schema import ScenarioError, read_scenario
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    read_scenario(scenario_file.read(Path(sys.argv[1])), Path())
except ScenarioError as error:
    print(str(error)[:100], file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - began)
"""
LARGE = {
    "brackets": "[" * 500_000,
    "values": "[" + "1," * 499_000 + "]",
    "aliases": "a: &a [1, 1]\n" + "\n".join(f"k{n}: &k{n} [*a, *a]" for n in range(40_000)),
    "keys": "\n".join(f"k{n}: 1" for n in range(90_000)),
    "text": "a: " + "x" * 999_000,
    "nodes": "cluster: {nodes: [" + "{name: a, gpus: [{type: A6000, total_gib: x}]}," * 7_000 + "]}",
    "names": "cluster: {nodes: [" + "".join(f"{{name: n{n // 2}, gpus: []}}," for n in range(7_900)) + "]}",
    "gpus": "cluster: {nodes: [{name: a, gpus: [{type: A6000, count: 1000000000, total_gib: 4}]}]}",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_no_file_takes_long_or_much(text: str, tmp_path: Path) -> None:
    """The bound is a second of CPU and 256 MiB; a machine half as fast as ours gets two."""
    assert len(text) <= scenario_file.MAX_BYTES
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    done = subprocess.run([sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=True)
    kib, cpu_s = map(float, done.stdout.split())
    assert kib * 1024 <= 256 << 20
    assert cpu_s <= 2.0
    assert done.stderr, "it was taken"
