"""The reader of the artifact's tables: as it writes them, as people mangle them, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.baselines.estimators.tables import GIB, parse_table, points, read_table
from controlplane.baselines.estimators.types import Family, Query, TableError

HEADER = (
    "Model,TP,PP,PP_Map,DTYPE,INT8_KV_Cache,Output_Lenght,Batch_Size,Latency,Memory-Pre-Run,"
    "Memory-After-Run,Time-Gen-Graph,Time-Prof"
)
ROW = "llama-2-7b,2,2,16 16,float16,False,100,8,2.5,14.25,16.5,90.1,30.2"
FINGERPRINT_HEADER = HEADER.replace("Time-Gen-Graph", "Time-Gen-Fingerprint,Time-Gen-Graph")


def one(text: str) -> Any:
    (row,) = parse_table(text).rows
    return row


def test_a_row_as_the_artifact_writes_it() -> None:
    row = one(f"{HEADER}\r\n{ROW}\r\n")
    assert row.query == Query(Family("llama-2-7b", "float16", False), 2, (16, 16), 100, 8)
    assert (row.query.layers, row.query.pipeline_parallel, row.query.ranks) == (32, 2, 4)
    assert (row.latency_s, row.memory_bytes, row.line) == (2.5, 16.5 * GIB, 2)


def test_a_fingerprint_row_is_read() -> None:
    text = f"{FINGERPRINT_HEADER}\ngptj-6b,1,1,2,int8,False,10,1,0.05,1,1.25,3.0,9,8\n"
    assert one(text).query == Query(Family("gptj-6b", "int8", False), 1, (2,), 10, 1)


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\n{ROW}\n",
        f"\n\n{HEADER}\n\n{ROW}\n\n",
        f" {HEADER.replace(',', ' , ')} \n {ROW.replace(',', ' , ')} \n",
        f"{HEADER}\n{HEADER}\n{ROW}\n{HEADER}\n",
        f"{HEADER.lower().replace('_', ' ')}\n{ROW}\n",
        f"{HEADER.replace('Lenght', 'Length')}\n{ROW}\n",
        f"{HEADER},Notes\n{ROW},extra\n",
        f"{HEADER},Notes\n{ROW}\n",
        f"{HEADER}\n{ROW.replace('16 16', '[16, 16]').replace('[16, 16]', chr(34) + '[16, 16]' + chr(34))}\n",
        f"{HEADER}\n{ROW.replace('16 16', '16-16')}\n",
        f"{HEADER}\n{ROW.replace('16 16', chr(39) + '16 16' + chr(39))}\n",
        f"{HEADER}\n{ROW.replace('16 16', '16_16')}\n",
        f"{HEADER}\n{ROW.replace('16 16', '16.0 16.0')}\n",
        f"{HEADER}\n{ROW.replace('float16', 'FP16').replace('llama-2-7b', 'Llama-2-7B-32layer')}\n",
        f"{HEADER}\n{ROW.replace('False', '0')}\n",
        f"{HEADER}\n{ROW.replace('False', 'no')}\n",
        f"{HEADER}\n{ROW.replace(',2,2,', ',2.0,2,')}\n",
        f"{HEADER.replace(',', ';')}\n{ROW.replace(',', ';')}\n",
    ],
)
def test_lenient_forms_are_read(text: str) -> None:
    assert one(text).query == one(f"{HEADER}\n{ROW}\n").query
    assert one(text).memory_bytes == 16.5 * GIB


def test_columns_may_come_in_any_order() -> None:
    order = [8, 3, 0, 1, 12, 2, 4, 5, 6, 7, 10, 9, 11]
    lines = [",".join(line.split(",")[at] for at in order) for line in (HEADER, ROW)]
    assert one("\n".join(lines)) == one(f"{HEADER}\n{ROW}\n")


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        *(("", "empty"), ("NaN", "nan"), ("OOM", "oom"), ("CUDA out of memory", "cuda out of memory")),
        *(("-1", "not positive"), ("0", "not positive"), ("inf", "inf"), ("Failed", "failed")),
    ],
)
def test_failed_rows_are_counted(cell: str, reason: str) -> None:
    bad = ROW.replace(",2.5,14.25,16.5,", f",{cell},,,")
    table = parse_table(f"{HEADER}\n{ROW}\n{bad}\n{bad}\n")
    assert len(table.rows) == 1
    assert table.failure_counts() == {reason: 2}
    assert [failure.line for failure in table.failures] == [3, 4]


def test_a_short_row_has_failed() -> None:
    table = parse_table(f"{HEADER}\n{ROW}\nllama-2-7b,8,1,32\n")
    assert table.failure_counts() == {"empty": 1}


def test_memory_may_be_missing() -> None:
    assert one(f"{HEADER}\n{ROW.replace('16.5', '')}\n").memory_bytes is None
    without = HEADER.replace("Memory-After-Run,", "")
    assert one(f"{without}\n{ROW.replace(',16.5', '')}\n").memory_bytes is None


def test_replicates_become_their_median() -> None:
    rows = [ROW.replace(",2.5,", f",{latency},") for latency in ("2.5", "9.0", "2.0")]
    (point,) = points(parse_table("\n".join([HEADER, *rows])).rows)
    assert (point.latency_s, point.memory_bytes, point.replicates) == (2.5, 16.5 * GIB, 3)


@pytest.mark.parametrize(
    ("old", "new", "column", "expected"),
    [
        (",2,2,", ",two,2,", "TP", "whole number"),
        (",2,2,", ",0,2,", "TP", "from 1"),
        (",2,2,", ",2,3,", "PP_Map", "3 stages"),
        ("16 16", "16 x", "PP_Map", "whole numbers of layers"),
        ("16 16", "-16 16", "PP_Map", "whole numbers of layers"),
        ("16 16", "16.5 15.5", "PP_Map", "whole numbers of layers"),
        ("16 16", "", "PP_Map", "layers of each stage"),
        ("False", "maybe", "INT8_KV_Cache", "True or False"),
        (",100,", ",-5,", "Output_Lenght", "whole number"),
        (",8,2.5", ",8.5,2.5", "Batch_Size", "whole number"),
        (",2.5,", ",fast,", "Latency", "positive number"),
        (",16.5,", ",lots,", "Memory-After-Run", "a number"),
        ("llama-2-7b", " ", "Model", "name of a model"),
        ("float16", "", "DTYPE", "number format"),
    ],
)
def test_bad_cells_name_their_place(old: str, new: str, column: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "truth.csv"
    path.write_text(f"{HEADER}\n{ROW}\n{ROW.replace(old, new, 1)}\n")
    with pytest.raises(TableError) as error:
        read_table(path)
    for word in (str(path), "line 3", f"column {column}", expected):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("Model,TP\nx,1\n", "missing PP, PP_Map"),
        (f"{HEADER},Latency\n{ROW},1\n", "found it twice"),
        (f"{HEADER}\n", "found only 0 failed rows"),
        (f"{HEADER}\n{ROW.replace('2.5', 'OOM')}\n", "found only 1 failed rows"),
        (f'{HEADER}\n"{ROW[:20]}\0\n' + "x" * 200_000, "line"),
    ],
)
def test_bad_tables_are_refused(text: str, words: str) -> None:
    with pytest.raises(TableError, match=words):
        parse_table(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00M")
    with pytest.raises(TableError, match="UTF-8"):
        read_table(tmp_path / "binary.csv")


QUERIES = st.builds(
    Query,
    st.builds(
        Family,
        st.from_regex(r"[a-z][a-z0-9.]{0,8}(-[0-9]{1,2}b)?", fullmatch=True),
        st.sampled_from(["float16", "int8", "int4", "int4_gptq", "fp8"]),
        st.booleans(),
    ).filter(lambda family: family.model not in {"model"}),
    st.integers(1, 64),
    st.lists(st.integers(1, 100), min_size=1, max_size=16).map(tuple),
    st.integers(1, 10_000),
    st.integers(1, 1024),
)
SEPARATORS = st.sampled_from([" ", ", ", "-", ";", " | ", "/"])


@given(
    st.lists(
        st.tuples(QUERIES, st.floats(1e-6, 1e6), st.none() | st.floats(1e-3, 1e6), SEPARATORS),
        min_size=1,
        max_size=8,
    ),
    st.permutations(range(11)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_a_written_file_is_read_back(
    rows: list[tuple[Query, float, float | None, str]], order: list[int], newline: str
) -> None:
    out = StringIO()
    writer = csv.writer(out, lineterminator=newline)
    names = [*HEADER.split(",")[:9], "Memory-After-Run", "Remark"]
    writer.writerow([names[at] for at in order])
    for query, latency, memory, separator in rows:
        cells = [
            *(query.family.model.upper(), query.tensor_parallel, query.pipeline_parallel),
            separator.join(map(str, query.layers_per_stage)),
            *(query.family.dtype, query.family.int8_kv, query.output_tokens, query.batch, repr(latency)),
            *("" if memory is None else repr(memory), "a, remark"),
        ]
        writer.writerow([cells[at] for at in order])
    read = parse_table(out.getvalue()).rows
    assert [row.query for row in read] == [query for query, *_ in rows]
    assert [row.latency_s for row in read] == [latency for _, latency, *_ in rows]
    for row, (_, _, memory, _) in zip(read, rows, strict=True):
        assert row.memory_bytes == (None if memory is None else pytest.approx(memory * GIB))


@given(st.text(max_size=300) | st.text(alphabet=HEADER + ROW + "\n\"'", max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    for whole in (text, f"{HEADER}\n{text}", f"{HEADER}\n{ROW}\n{text}"):
        with contextlib.suppress(TableError):
            assert parse_table(whole).rows
