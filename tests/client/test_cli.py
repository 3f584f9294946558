from __future__ import annotations

import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from controlplane import __version__, errors
from controlplane.cli import main as cli_main
from controlplane.cli import models as cli_models
from controlplane.cli import waiting
from controlplane.client.client import Client
from controlplane.management.schemas.compression import CompressionForm
from controlplane.management.schemas.models import OperationView, RegisterModelRequest
from controlplane.runtime import local
from controlplane.settings import Settings
from testkit.client.command_line import Cli
from testkit.client.fake_api import (
    FakeApi,
    answer,
    chat_chunks,
    deployment,
    error,
    events,
    model,
    operation,
    text,
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that `up` and `down` were called with, in place of a cluster."""
    seen: list[Settings] = []

    def up(
        settings: Settings, progress: local.Progress, dashboard_port: int = 0, supervised: bool = True
    ) -> local.LocalCluster:
        progress("starting [really]")
        seen.append(settings)
        url, board = f"http://127.0.0.1:{settings.http_port}", f"http://127.0.0.1:{dashboard_port}"
        return local.LocalCluster(str(settings.home), url, board, "127.0.0.1:1", "/tmp/x", "mark")

    def down(settings: Settings, progress: local.Progress) -> bool:
        seen.append(settings)
        return len(seen) == 1

    monkeypatch.setattr(local, "up", up)
    monkeypatch.setattr(local, "find", lambda settings: up(settings, lambda message: None))
    monkeypatch.setattr(local, "ray_token", lambda settings: "token")
    monkeypatch.setattr(local, "down", down)
    return seen


def use_demo(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    demo = types.ModuleType("controlplane.demo.run")

    def run() -> int:
        print("demo says hello")
        return code

    demo.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "controlplane.demo.run", demo)


FAILED = operation("Failed", error=error("no_feasible_plan", "it needs 9 GiB; loosen the limit")["error"])

JSON_COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "register": (["register", "smol", "bundled://smol"], {"operation", "model"}),
    "deploy": (["deploy", "smol"], {"operation", "deployment"}),
    "infer": (
        ["infer", "smol", "2+2?"],
        {"model", "outputText", "finishReason", "inputTokens", "outputTokens", "format", "note"},
    ),
    "status": (["status"], {"status", "models", "deployments"}),
    "cluster": (["cluster"], {"nodes"}),
    "models": (["models"], {"models"}),
    "describe": (["describe", "smol"], {"model", "deployment"}),
    "operations": (["operations"], {"operations"}),
    "cancel": (["cancel", "op-1"], {"operation"}),
    "undeploy": (["undeploy", "smol"], {"operation"}),
    "delete": (["delete", "smol"], {"operation"}),
    "rebalance": (["rebalance", "--dry-run"], {"rebalance"}),
    "tune": (["tune", "smol", "--max-active-variants", "2"], {"deployment", "measurements"}),
    "prefetch": (["prefetch", "v1"], {"deployments"}),
    "logs": (["logs", "smol"], {"model", "lines"}),
    "up": (["up"], {"home", "url", "dashboard_url", "ray_address", "temp_dir", "mark", "installation"}),
    "dashboard": (["dashboard"], {"url", "token"}),
    "down": (["down"], {"stopped"}),
    "demo": (["demo"], {"ok"}),
    "keys": (["keys", "new"], {"key", "entry"}),
    "version": (["version"], {"version"}),
}
# These write a folder: run twice, they would find it there. test_checkpoints.py runs them.
ON_FOLDERS = {"compress", "merge"}
# test_cli_evaluate.py, test_estimators.py, test_cli_plan.py, test_cli_simulate.py
ON_FILES = {"evaluate", "evaluate_estimator", "plan", "simulate"}
ESTIMATING = {"estimate", "profile"}  # in test_cli_estimates.py
STREAMING = {"watch": ["watch", "op-1"], "chat": ["chat", "smol"]}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", JSON_COMMANDS)
def test_json_is_one_document_and_all_of_stdout(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    use_demo(monkeypatch, 0)
    argv, keys = JSON_COMMANDS[name]
    ended = cli(*argv, "--json")
    assert ended.code == 0
    assert ended.json.keys() == keys
    assert len(ended.lines) == 1
    assert cli("--json", *argv).json.keys() == keys


@pytest.mark.parametrize("name", STREAMING)
def test_json_of_a_stream_is_a_line_each(name: str, cli: Cli) -> None:
    ended = cli(*STREAMING[name], "--json", stdin="hi\n/exit\n")
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.lines) > 1
    assert ended.lines[-1]["done"] is True


def test_every_command_has_a_json_test() -> None:
    listed = {c.name.replace("-", "_") for c in cli_main.COMMANDS if c.name}
    assert listed == JSON_COMMANDS.keys() | STREAMING.keys() | ON_FOLDERS | ON_FILES | ESTIMATING


@pytest.mark.slow
def test_the_help_of_every_command_names_json(cli: Cli) -> None:
    for command in cli_main.COMMANDS:
        assert command.name
        assert "--json" in cli(command.name, "--help").out


# The texts that people see


def test_register_adds_a_base(cli: Cli, api: FakeApi) -> None:
    ready = operation("Ready", kind="register_model")
    api.script("GET /operations/op-1/watch", events(operation("Profiling", 0.4, reason="reading [x]"), ready))
    ended = cli(
        "register", "smol", "bundled://smol", "--compression", "none=100", "--compression", "int8=99.5"
    )
    assert ended.code == 0
    assert "'smol' is Ready" in ended.out
    assert "smol: Profiling 40%  reading [x]" in ended.err
    assert api.calls("POST /register_model")[0][0] == {
        "model": "smol",
        "source": "bundled://smol",
        "compressionTechnique": {"none": 100.0, "int8": 99.5},
    }


def test_register_a_variant_from_a_relative_folder(cli: Cli, api: FakeApi) -> None:
    assert cli("register", "v1", "--base", "smol", "--adapter", "./some/folder").code == 0
    body = api.calls("POST /register_model")[0][0]
    assert (body["base"], body["adapter"]) == ("smol", str(Path.cwd() / "some/folder"))


def test_a_name_of_the_hub_is_sent_as_it_is_unless_it_is_a_folder(
    cli: Cli, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("register", "v1", "--base", "smol", "--adapter", "some/folder").code == 0
    Path("some/folder").mkdir(parents=True)
    assert cli("register", "v1", "--base", "smol", "--adapter", "some/folder").code == 0
    sent = [body["adapter"] for body, *_ in api.calls("POST /register_model")]
    assert sent == ["some/folder", str(tmp_path / "some/folder")]


def test_register_a_fine_tune_of_a_base(cli: Cli, api: FakeApi) -> None:
    line = "register v1 ./some/tuned --base smol --method deltamix --ratio 0.0625 --max-widths 3 --lossless"
    ended = cli(*line.split(), "--evaluation", "tasks.jsonl", "--calibration", "/c.jsonl", "--rows", "9")
    assert ended.code == 0, ended.err
    assert api.calls("POST /register_model")[0][0] == {
        "model": "v1",
        "source": str(Path.cwd() / "some/tuned"),
        "base": "smol",
        "compression": {
            "method": "deltamix",
            "ratio": 0.0625,
            "maxWidths": 3,
            "calibration": "/c.jsonl",
            "rows": 9,
            "evaluation": str(Path.cwd() / "tasks.jsonl"),
            "lossless": True,
            "device": "auto",
        },
    }


COMPRESSION = {
    "method": "deltacompress",
    "options": {"bits": 4, "evaluation": "/t"},
    "share": 0.4,
    "etaS": 75.0,
    "step": "layer 3 of 8",
    "node": "n1",
    "artifact": None,
}


def test_describe_shows_how_far_compressing_is(cli: Cli, api: FakeApi) -> None:
    half = model("v1", base="smol", source="/m/tuned", phase="Compressing", compression=COMPRESSION)
    api.script("GET /models/v1", answer(half))
    shown = cli("describe", "v1").out
    assert "deltacompress, bits 4, evaluation /t" in shown
    assert "40% on n1: layer 3 of 8, about 75 s left" in shown
    assert "smol + /m/tuned" in shown


def test_describe_shows_what_came_out(cli: Cli, api: FakeApi) -> None:
    loss = {"task": "sums", "metric": "exact_match", "before": 0.8, "after": 0.76, "loss": 4.0}
    artifact = {
        "method": "deltacompress (4 bits)",
        "sizeBytes": 10 << 20,
        "uncompressedBytes": 40 << 20,
        "ratio": 4.0,
        "layerErrors": {"q_proj": 0.0123},
        "quality": {"accuracy": 95.0, "losses": [{**loss, "low": 1.0, "high": 7.0, "items": 100}]},
        "warnings": ["few texts"],
        "seconds": 12.0,
    }
    done = {**COMPRESSION, "share": 1.0, "artifact": artifact}
    api.script("GET /models/v1", answer(model("v1", base="smol", adapter="/a", compression=done)))
    shown = " ".join(cli("describe", "v1").out.split())
    for words in (
        "4.0 times smaller than 40.0 MiB, in 12 s",
        "95.0% of the fine-tune's (sums: exact_match 0.8 -> 0.76)",
        "q_proj 0.0123",
        "few texts",
    ):
        assert words in shown, shown


def test_deploy_prints_the_plan_where_and_why(cli: Cli, api: FakeApi) -> None:
    ended = cli("deploy", "smol", "--intent", "latSLO", "--ttft-ms", "50", "--max-output", "64")
    assert ended.code == 0
    for words in (
        "tensor parallel 1",
        "rank 0 on n1 cpu:0, layers 0-29, 1.0 GiB",
        "the least memory [of 3 plans]",
    ):
        assert words in ended.out
    body = api.calls("POST /deploy_model")[0][0]
    asked = {"model": "smol", "maxOutputLength": 64, "intent": "latSLO", "SLOs": {"ttft_ms": 50.0}}
    free = {"tensorParallel": [], "pipelineParallel": [], "layersPerStage": [], "load": {"ratePerS": 0.0}}
    assert body == asked | free


def test_register_a_fine_tune_as_it_is_done_by_default(cli: Cli, api: FakeApi) -> None:
    ended = cli("register", "v1", "/m/tuned", "--base", "smol")
    assert ended.code == 0, ended.err
    body = api.calls("POST /register_model")[0][0]
    assert (body["source"], body["base"]) == ("/m/tuned", "smol")
    assert RegisterModelRequest.model_validate(body).compression == CompressionForm()


@pytest.mark.parametrize("text", ["1/16", "0.0625", "6.25e-2"])
def test_a_ratio_is_a_fraction_or_a_number(cli: Cli, api: FakeApi, text: str) -> None:
    assert cli(*f"register v1 /m/tuned --base smol --method deltamix --ratio {text}".split()).code == 0
    assert api.calls("POST /register_model")[0][0]["compression"]["ratio"] == 0.0625


@pytest.mark.parametrize(
    "argv", ["register smol bundled://smol", "deploy smol", "undeploy smol"], ids=lambda argv: argv.split()[0]
)
def test_no_wait_prints_the_id(argv: str, cli: Cli, api: FakeApi) -> None:
    assert cli(*argv.split(), "--no-wait").out == "op-1\n"
    assert cli(*argv.split(), "--no-wait", "--json").json["operation"]["phase"] == "Pending"
    assert not api.calls("GET /operations/op-1/watch")


def test_status_is_one_table(cli: Cli, api: FakeApi) -> None:
    served = deployment("v1", host="smol", plan=None)
    api.script("GET /deployments", answer({"deployments": [served, deployment()]}))
    base, variant = cli("status").out.splitlines()[1:3]
    assert base.split()[:5] == ["smol", "Ready", "Deployed", "RUNNING", "x1"]
    assert variant.startswith("  v1")
    assert "in 'smol'" in variant
    assert "n1 cpu:0 4.0 GiB of 8.0 GiB free" in cli("status").out


def test_a_row_in_a_pipe_is_one_line_whatever_its_length(cli: Cli, api: FakeApi) -> None:
    """The output that grep and awk read: nothing is folded, and nothing follows the last word."""
    reason = "it does not fit: " + "very " * 100 + "large\nand more"
    api.script("GET /models", answer({"models": [model("smol", reason=reason)]}))
    header, row = cli("models").out.splitlines()
    assert header.split() == ["MODEL", "PHASE", "DEPLOYED", "FROM", "WEIGHTS", "REASON"]
    assert row.endswith("very large and more")
    assert header == header.rstrip()
    assert header.index("PHASE") == row.index("Ready")


def test_cluster_lists_holders_of_memory_and_unused_nodes(cli: Cli) -> None:
    device, *rest = cli("cluster").out.splitlines()[1:]
    for words in ("n1", "h200:0", "8.0 GiB", "2.0 GiB", "3.0 GiB", "4.0 GiB", "25%", "0.5 s ago"):
        assert words in device
    assert device.strip().endswith("smol 3.0 GiB / 1.0 GiB")  # promised / taken
    assert rest == [
        "Ostinato places no new engines on n2: stale report: the last report of node n2 was 7.2 s ago",
        "n2 no longer reports h200:3, where old has reserved 1.0 GiB",
    ]


def test_an_empty_installation_names_the_next_command(cli: Cli, api: FakeApi) -> None:
    api.script("GET /models", answer({"models": []}))
    api.script("GET /operations", answer({"operations": []}))
    assert "ostinato register" in cli("models").out
    assert "ostinato register" in cli("status").out
    assert "no operations" in cli("operations").out


def test_lists_and_facts(cli: Cli, api: FakeApi) -> None:
    api.script("GET /operations", answer({"operations": [FAILED]}))
    assert "smol + /a" in cli("models").out
    assert "it needs 9 GiB" in cli("operations").out
    described = cli("describe", "smol").out
    assert "3.0 MiB" in described
    assert "Placed" in described
    assert cli("logs", "smol").out == "one\ntwo\n"
    assert cli("delete", "smol").out == "'smol' is Deleted: now Deleted\n"
    assert cli("undeploy", "smol").out == "'smol' is no longer deployed\n"
    assert "ostinato watch op-1" in cli("cancel", "op-1").out
    assert cli("watch", "op-1").out == "deploy_model 'smol' is Deployed\n"
    assert cli("version").out == f"{__version__}\n"


def test_describe_what_is_not_deployed(cli: Cli, api: FakeApi) -> None:
    api.script("GET /deployments/smol", answer(error("not_deployed"), 404))
    api.script("GET /models/smol", answer(model(deployed=False, reason="[/odd] reason")))
    assert cli("describe", "smol", "--json").json["deployment"] is None
    assert "[/odd] reason" in cli("describe", "smol").out


def test_infer_reads_stdin(cli: Cli, api: FakeApi) -> None:
    assert cli("infer", "smol", "-", "--raw", "--max-output", "9", stdin="long text").out == "four\n"
    body = api.calls("POST /inference_model")[0][0]
    assert body == {"model": "smol", "inputText": "long text", "maxOutputLength": 9, "format": "raw"}


def test_infer_reports_on_stderr_that_it_completed_a_text(cli: Cli, api: FakeApi) -> None:
    note = "'smol' has no chat template, so the text was completed without a template"
    given = {
        "model": "smol",
        "outputText": " four",
        "finishReason": "stop",
        "inputTokens": 5,
        "outputTokens": 1,
    }
    api.script("POST /inference_model", answer({**given, "format": "raw", "note": note}))
    ended = cli("infer", "smol", "2+2=")
    assert (ended.out, ended.err) == (" four\n", note + "\n")
    assert api.calls("POST /inference_model")[0][0]["format"] == "auto"


def test_chat_without_a_template_names_the_command_to_type(cli: Cli, api: FakeApi) -> None:
    refusal = errors.NoChatTemplate("no template; send its text to POST /v1/completions", param="messages")
    api.script("POST /v1/chat/completions", answer(refusal.body(), 400))
    ended = cli("chat", "smol", stdin="hi\n")
    assert ended.code == 1
    assert "ostinato infer MODEL TEXT" in ended.err


def test_chat_remembers_earlier_messages(cli: Cli, api: FakeApi) -> None:
    api.script("POST /v1/chat/completions", chat_chunks("Hel", "lo"), chat_chunks("bye"))
    assert cli("chat", "smol", stdin="hi\n\nand?\n").out == "Hello\nbye\n"
    said = [m["content"] for m in api.calls("POST /v1/chat/completions")[1][0]["messages"]]
    assert said == ["hi", "Hello", "and?"]


def test_up_and_down_pass_their_options(
    cli: Cli, cluster: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_DASHBOARD", "1")
    ended = cli("up", "--port", "8123", "--home", str(tmp_path), "--dashboard-port", "8265")
    assert "http://127.0.0.1:8123" in ended.out
    assert "http://127.0.0.1:8265" in ended.out
    assert "starting [really]" in ended.err
    assert (cluster[0].http_port, cluster[0].home) == (8123, tmp_path)
    assert cli("down", "--home", str(tmp_path)).out == "nothing was running\n"


def test_up_refuses_a_port_for_a_dashboard_that_is_left_out(
    cli: Cli, cluster: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTINATO_DASHBOARD", "0")
    ended = cli("up", "--dashboard-port", "8265")
    assert (ended.code, cluster) == (2, [])
    assert "OSTINATO_DASHBOARD=0 starts no dashboard" in ended.err


# Failing


def test_a_failed_demo_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    use_demo(monkeypatch, 1)
    ended = cli("demo", "--json")
    assert (ended.code, ended.json) == (1, {"ok": False})


def test_an_api_error_is_two_lines(cli: Cli, api: FakeApi) -> None:
    api.script("GET /models", answer(error("overloaded", "too many requests"), 429))
    ended = cli("models")
    assert (ended.code, ended.out) == (1, "")
    assert (
        ended.err == "Error: too many requests\nHint:  try again in a moment, with fewer requests at once\n"
    )
    assert "Traceback" not in ended.err


def test_an_api_error_in_json(cli: Cli, api: FakeApi) -> None:
    api.script("GET /models", answer(error("overloaded"), 429))
    ended = cli("models", "--json")
    assert (ended.code, ended.out) == (1, "")
    assert (ended.error["error"]["code"], ended.error["exitCode"]) == ("overloaded", 1)


@pytest.mark.parametrize("argv", [["register", "smol", "file:///x"], ["deploy", "smol"], ["watch", "op-1"]])
def test_a_failed_operation_exits_1(argv: list[str], cli: Cli, api: FakeApi) -> None:
    api.script("GET /operations/op-1/watch", events(FAILED))
    api.script("GET /deployments/smol", answer(error("not_deployed"), 404))
    ended = cli(*argv)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.endswith("Error: it needs 9 GiB\nHint:  loosen the limit\n")
    ended = cli(*argv, "--json")
    assert (ended.code, ended.error["error"]["code"]) == (1, "no_feasible_plan")
    assert ended.json


@pytest.mark.parametrize(
    ("message", "code", "hint"),
    [
        ("'m' is not deployed; deploy it with POST /deploy_model", "not_deployed", "`ostinato deploy MODEL`"),
        ("no model 'm'; `GET /models` lists the registered models", "model_not_found", "`ostinato models`"),
        ("rank is 99; start Ostinato with more", "adapter_mismatch", "start Ostinato with more"),
    ],
)
def test_hints_are_what_a_reader_of_the_terminal_can_type(
    api: FakeApi, cli: Cli, message: str, code: str, hint: str
) -> None:
    api.script("GET /models", answer(error(code, message), 404))
    ended = cli("models").err
    assert hint in ended.splitlines()[1]
    assert "GET /" not in ended
    assert "POST /" not in ended


def test_a_cancelled_operation_exits_1(cli: Cli, api: FakeApi) -> None:
    api.script("GET /operations/op-1/watch", events(operation("Cancelled")))
    ended = cli("undeploy", "smol", "--json")
    assert (ended.code, ended.error["error"]["code"]) == (1, "cancelled")


@pytest.mark.parametrize("argv", [["models"], ["watch", "op-1"], ["infer", "smol", "x"], ["chat", "smol"]])
def test_not_reachable_exits_3(argv: list[str], cli: Cli, nowhere: str) -> None:
    ended = cli("--url", nowhere, *argv, stdin="hi\n")
    assert (ended.code, ended.out.strip()) == (3, "")
    assert ended.err.startswith(
        f"Error: no server answers at {nowhere}\nHint:  start Ostinato with `ostinato up`"
    )
    assert cli("--url", nowhere, *argv, "--json", stdin="hi\n").error["exitCode"] == 3


@pytest.mark.parametrize(
    "line",
    [
        "deploy",
        "frobnicate",
        "models --colour red",
        "deploy smol --intent fast",
        "deploy smol --intent latSLO",
        "deploy smol --max-output 0",
        "deploy smol --accuracy 101 --intent accSLO",
        "register smol",
        "register smol --base b",
        "register smol bundled://smol --base b --method low-rank --ratio 1/0",
        "register smol bundled://smol --base b --method low-rank --ratio 3/2",
        "register smol bundled://smol --base b --ratio 1/16",
        "register -bad- bundled://smol",
        "register smol bundled://smol --compression int8",
        "register smol bundled://smol --compression int8=much",
        "--url foo models",
    ],
)
def test_usage_errors_exit_2(line: str, cli: Cli, api: FakeApi) -> None:
    ended = cli(*line.split())
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 2
    ended = cli(*line.split(), "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error["exitCode"] == 2
    assert not api.asked


def test_a_defect_shows_a_traceback_only_with_debug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("oh dear")

    monkeypatch.setattr(cli_models, "print_table", broken)
    ended = cli("models")
    assert (ended.code, len(ended.err.splitlines())) == (1, 2)
    assert "--debug" in ended.err
    ended = cli("--debug", "models")
    assert ended.code == 1
    assert "Traceback" in ended.err


def test_only_a_long_log_stays_whole_in_json(cli: Cli, api: FakeApi) -> None:
    api.script("GET /models", answer(error("engine_failed", "it died:\nline 1\nline 2"), 502))
    assert cli("models").err.startswith("Error: it died\nHint: ")
    assert cli("models", "--json").error["error"]["message"].endswith("line 2")


def test_logs_of_an_empty_engine(cli: Cli, api: FakeApi) -> None:
    api.script("GET /deployments/smol/logs", text(""))
    assert cli("logs", "smol", "--json").json["lines"] == []


# Ctrl-C


def interrupted_watch(client: Client, operation_id: str) -> Any:
    yield OperationView.model_validate(operation("Deploying", 0.5))
    raise KeyboardInterrupt


@pytest.mark.parametrize("argv", [["deploy", "smol"], ["undeploy", "smol"], ["watch", "op-1"]])
def test_ctrl_c_reports_that_the_operation_continues(
    argv: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "watch", interrupted_watch)
    ended = cli(*argv)
    assert ended.code == 130
    assert "operation op-1 continues" in ended.err
    assert "`ostinato watch op-1` follows it, `ostinato cancel op-1` stops it" in ended.err
    assert cli(*argv, "--json").error["error"]["code"] == "interrupted"


def test_a_cut_answer_is_reported(cli: Cli, api: FakeApi) -> None:
    """On stderr: what the model said stays what it said."""
    said = {
        "model": "smol",
        "outputText": "once",
        "inputTokens": 1,
        "outputTokens": 7,
        "format": "chat",
        "note": "",
    }
    chunk = {"choices": [{"index": 0, "delta": {"content": "once"}}]}
    for reason, told in (("length", True), ("stop", False)):
        api.script("POST /inference_model", answer({**said, "finishReason": reason}))
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        api.script("POST /v1/chat/completions", events(chunk, last, "[DONE]"))
        asked, talked = cli("infer", "smol", "go on"), cli("chat", "smol", stdin="go on\n")
        assert (asked.out, talked.out) == ("once\n", "once\n")
        assert ("cut after 7 tokens" in asked.err) is told
        assert ("cut at its longest" in talked.err) is told
        assert ("--max-output" in asked.err and "--max-output" in talked.err) is told
        assert cli("chat", "smol", "--json", stdin="go on\n").lines[-1]["finishReason"] == reason


def test_ctrl_c_in_a_chat_stops_only_the_answer(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(client: Client, *args: object, **kwargs: object) -> Any:
        yield {"choices": [{"delta": {"content": "Once upon"}}]}
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "chunks", stopped)
    ended = cli("chat", "smol", stdin="tell\nagain\n")
    assert (ended.code, ended.out) == (0, "Once upon [stopped]\n" * 2)


def test_the_installed_command_meets_a_real_sigint(api: FakeApi) -> None:
    hold = threading.Event()
    api.script("GET /operations/op-1/watch", events(operation("Deploying", 0.5), hold=hold))
    code = (  # pytest itself may run with SIGINT ignored, which a child inherits
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from controlplane.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "--url", api.url, "deploy", "smol"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert "Deploying 50%" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            hold.set()
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert "operation op-1 continues" in err
    assert "Traceback" not in err


def test_the_live_line_shows_reasons_as_they_are() -> None:
    view = OperationView.model_validate(operation("Deploying", 0.25, reason="[/b] 1 of 4"))
    assert waiting.progress_line(view) == "smol: Deploying 25%  [/b] 1 of 4"


def test_describe_shows_a_variant(cli: Cli, api: FakeApi) -> None:
    modules = {
        "q_proj": {"sizeBytes": 9, "rank": 8, "factors": 0, "blockSize": 0},
        "up_proj": {"sizeBytes": 9, "rank": 0, "factors": 2, "blockSize": 16},
    }
    spec = {
        "modules": modules,
        "bits": [8, 3],
        "fullBytes": 2048,
        "replacesEmbedding": True,
        "replacesHead": False,
    }
    api.script(
        "GET /models/v1", answer(model("v1", base="smol", adapter="/a", kind="svd_delta", variant=spec))
    )
    api.script("GET /deployments/v1", answer(error("model_not_found"), 404))
    shown = cli("describe", "v1").out
    for words in ("svd_delta", "q_proj (rank 8), up_proj (m=2, b=16)", "8/3", "2.0 KiB", "embedding"):
        assert words in shown
