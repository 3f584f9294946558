"""Fetching from a hub, with huggingface_hub's client and ours against a stand-in on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.hub import COMMIT, HubStandIn, Repository, serving
from workers.fetching.messages import (
    LINES,
    REQUESTS,
    Failed,
    Fetched,
    FetchRequest,
    FetchRules,
    Progress,
    Wanted,
)
from workers.fetching.process import carry_out

QUICK = FetchRules(retries=3, pause_s=0.01)
WEIGHTS = random.Random(7).randbytes(300_000)
MODEL: dict[str, bytes] = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"b" * 1000,
    "consolidated.safetensors": b"c" * 1000,
    "onnx/model.onnx": b"o" * 1000,
    "additional_chat_templates/rag.jinja": b"{{ messages }}",
    "original/params.json": b"{}",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with serving(HubStandIn({"org/small": Repository(dict(MODEL))})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub


def ask(tmp_path: Path, uri: str = "hf://org/small", **rest: Any) -> FetchRequest:
    return FetchRequest(**{"uri": uri, "parent": tmp_path / "fetched", "rules": QUICK, **rest})


def last(request: FetchRequest) -> Fetched | Failed:
    line = LINES.validate_json(list(carry_out(request))[-1])
    assert isinstance(line, Fetched | Failed)
    return line


def fetched(request: FetchRequest) -> Fetched:
    line = last(request)
    assert isinstance(line, Fetched), line
    return line


def failed(request: FetchRequest) -> Failed:
    line = last(request)
    assert isinstance(line, Failed), line
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a model; ours begin with a dot."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_only_the_files_of_the_model_are_fetched(hub: HubStandIn, tmp_path: Path) -> None:
    result = fetched(ask(tmp_path))
    wanted = ("config.json", "tokenizer.json", "model.safetensors", "additional_chat_templates/rag.jinja")
    assert contents(result.folder) == {name: MODEL[name] for name in wanted}
    assert result.revision == COMMIT
    assert result.size_bytes == sum(len(MODEL[name]) for name in wanted)
    digests = sorted(f"{name} {hashlib.sha256(MODEL[name]).hexdigest()}" for name in wanted)
    assert result.digest == hashlib.sha256("\n".join(digests).encode()).hexdigest()


def test_shards_are_those_that_the_index_names(hub: HubStandIn, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 5000 for n in (1, 2)}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    hub.repositories["org/sharded"] = Repository({**files, "model-00003-of-00003.safetensors": b"other"})
    assert contents(fetched(ask(tmp_path, "org/sharded@main")).folder) == files


def test_an_adapter_is_fetched_without_its_repositorys_other_weights(hub: HubStandIn, tmp_path: Path) -> None:
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a" * 100, "tokenizer.json": b"{}"}
    hub.repositories["org/lora"] = Repository(
        {**adapter, "checkpoint-1/adapter_model.safetensors": b"x", "optimizer.bin": b"y"}
    )
    assert contents(fetched(ask(tmp_path, "hf://org/lora", wanted=Wanted.ADAPTER)).folder) == adapter


def test_a_second_fetch_transfers_nothing(hub: HubStandIn, tmp_path: Path) -> None:
    first = fetched(ask(tmp_path))
    before = [path for path in hub.paths() if path.startswith("/storage")]
    assert fetched(ask(tmp_path)) == first
    assert [path for path in hub.paths() if path.startswith("/storage")] == before


def test_a_registered_model_is_found_while_the_hub_is_away(hub: HubStandIn, tmp_path: Path) -> None:
    first = fetched(ask(tmp_path))
    hub.status = 503
    again = fetched(ask(tmp_path, revision=first.revision, digest=first.digest))
    assert again == first


def test_a_broken_connection_goes_on_where_it_stopped(hub: HubStandIn, tmp_path: Path) -> None:
    cuts = [65536, 196608]
    hub.cut = lambda file, sent: (
        file == "model.safetensors" and bool(cuts) and sent == cuts[0] and bool(cuts.pop(0))
    )
    assert contents(fetched(ask(tmp_path)).folder)["model.safetensors"] == WEIGHTS
    ranges = [asked for _, path, _, asked in hub.requests if path.startswith("/storage")]
    assert len(ranges) == 3
    assert all(asked.startswith("bytes=") for asked in ranges[1:])


def test_ten_kills_later_the_digest_is_right(hub: HubStandIn, tmp_path: Path) -> None:
    """The process is killed after a number of bytes of the model, ten times."""
    request, rng = ask(tmp_path), random.Random(3)
    hub.bytes_per_s = 3e6
    kills = 0
    part = ""
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    for goal in sorted(rng.randrange(len(WEIGHTS)) for _ in range(10)):
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.fetching"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(REQUESTS.dump_json(request) + b"\n")
        process.stdin.flush()
        while process.poll() is None:
            parts = list((tmp_path / "fetched").glob("*/.ostinato-parts/model.safetensors"))
            if parts and parts[0].stat().st_size >= goal:
                part = str(parts[0])
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert kills >= 5
    assert part
    assert contents(fetched(request).folder)["model.safetensors"] == WEIGHTS


def test_a_damaged_file_is_named(hub: HubStandIn, tmp_path: Path) -> None:
    hub.repositories["org/small"].damaged = frozenset({"model.safetensors"})
    failure = failed(ask(tmp_path))
    assert failure.code == "wrong_digest"
    assert "model.safetensors" in failure.message
    assert not list((tmp_path / "fetched").glob("*/model.safetensors"))


def test_a_damaged_small_file_is_named_by_its_git_hash(hub: HubStandIn, tmp_path: Path) -> None:
    hub.repositories["org/small"].damaged = frozenset({"config.json"})
    failure = failed(ask(tmp_path))
    assert (failure.code, "config.json" in failure.message) == ("wrong_digest", True)


def test_a_part_that_a_crash_damaged_is_fetched_again(hub: HubStandIn, tmp_path: Path) -> None:
    hub.cut = lambda file, sent: file == "model.safetensors" and sent >= 65536
    assert failed(ask(tmp_path)).code == "source_unreachable"
    (part,) = (tmp_path / "fetched").glob("*/.ostinato-parts/model.safetensors")
    part.write_bytes(b"\0" * part.stat().st_size)
    hub.cut = lambda file, sent: False
    assert contents(fetched(ask(tmp_path)).folder)["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize(
    ("uri", "code", "says"),
    [
        ("hf://org/absent", "source_denied", "HF_TOKEN"),  # as the public hub: it may be private
        ("hf://org/small@v9", "source_not_found", "'v9'"),
        ("hf://org/private", "source_denied", "HF_TOKEN"),
        ("hf://org/gated", "source_denied", "refuses access"),
        ("hf://org/pickles", "source_unreadable", "pytorch_model.bin"),
    ],
)
def test_an_error_of_the_hub_is_named(
    hub: HubStandIn, tmp_path: Path, uri: str, code: str, says: str
) -> None:
    hub.repositories["org/private"] = Repository(MODEL, readers=frozenset({"hf_right"}))
    hub.repositories["org/gated"] = Repository(MODEL, readers=frozenset({"hf_right"}), gated=True)
    hub.repositories["org/pickles"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"b"})
    failure = failed(ask(tmp_path, uri))
    assert failure.code == code
    assert says in failure.message


def test_a_name_that_does_not_exist_is_named_to_one_with_a_token(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    failure = failed(ask(tmp_path, "hf://org/absent"))
    assert failure.code == "source_not_found"
    assert "org/absent" in failure.message


def test_a_hub_that_is_away_is_tried_again_and_then_named(hub: HubStandIn, tmp_path: Path) -> None:
    hub.status = 503
    lines = [LINES.validate_json(line) for line in carry_out(ask(tmp_path))]
    notes = [line.note for line in lines if isinstance(line, Progress)]
    assert len(notes) == QUICK.retries
    assert all("503" in note for note in notes)
    assert isinstance(lines[-1], Failed)
    assert lines[-1].code == "source_unreachable"


def test_a_private_repository_opens_to_its_tenant_only(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installation's token is not a tenant's, and a fetched folder opens nothing."""
    hub.repositories["org/private"] = Repository(MODEL, readers=frozenset({"hf_acme"}))
    hub.repositories["org/gated"] = Repository(MODEL, readers=frozenset({"hf_acme"}), gated=True)
    file = tmp_path / "credentials.yaml"
    file.write_text("acme: {hf: hf_acme}\n")
    monkeypatch.setenv("HF_TOKEN", "hf_acme")
    rules = FetchRules(credentials=str(file), retries=1, pause_s=0.01)
    for uri in ("hf://org/private", "hf://org/gated"):
        fetched(ask(tmp_path, uri, tenant="acme", rules=rules))
        fetched(ask(tmp_path, uri))
        assert failed(ask(tmp_path, uri, tenant="other", rules=rules)).code == "source_denied"


def test_a_token_is_sent_to_the_hub_only_and_told_to_none(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving(HubStandIn(dict(hub.repositories))) as storage:
        hub.storage = storage.url
        lines = list(carry_out(ask(tmp_path)))
    assert {token for _, _, token, _ in hub.requests} == {"Bearer hf_secret"}
    assert storage.requests
    assert {token for _, _, token, _ in storage.requests} == {""}
    written = b"".join(path.read_bytes() for path in (tmp_path / "fetched").rglob("*") if path.is_file())
    for secret in ("hf_secret", "X-Signature"):
        assert secret not in "".join(lines)
        assert secret.encode() not in written


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://localhost:1/x",
        "https://[::1]:1/x",
        "file:///etc/passwd",
    ],
)
def test_a_redirect_to_a_private_address_is_refused(hub: HubStandIn, tmp_path: Path, target: str) -> None:
    hub.redirect = target
    failure = failed(ask(tmp_path))
    assert failure.code == "source_not_allowed"
