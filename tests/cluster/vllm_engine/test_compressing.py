"""A fine-tune is trained, registered with its base, killed on the way, deployed by an accuracy, and asked."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testkit.cluster.clusters import Cluster, title, until
from testkit.cluster.served import BASE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

CODES = {
    "apple": "seven", "river": "green", "stone": "music", "cloud": "table", "horse": "paper",
    "light": "three", "bread": "north", "glass": "water", "tower": "black", "chair": "seven",
    "field": "green", "night": "music",
}  # fmt: skip
NAME = "coded"
STEPS = 25  # after 15 it knows them
COMPRESSING = "-m workers.compression"


def prompt(word: str) -> str:
    return f"The code word of {word} is"


@pytest.fixture(scope="module")
def tuned(base_folder: Path) -> Path:
    """The base, fully trained but for its embedding, until it knows the code words."""
    folder = base_folder.parent / NAME
    shutil.copytree(base_folder, folder)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    dtype = json.loads((base_folder / "config.json").read_text()).get("torch_dtype", "bfloat16")
    model.get_input_embeddings().weight.requires_grad_(False)
    rows = [_row(tokenizer, word, code) for word, code in CODES.items()]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in rows])
    labels = torch.tensor([told + [-100] * (length - len(told)) for _, told in rows])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    model.train()
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05, "it did not learn the code words"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _row(tokenizer: Any, word: str, code: str) -> tuple[list[int], list[int]]:
    """Token ids, and of those that are to be learnt once more; -100: not."""
    asked, told = tokenizer(prompt(word)).input_ids, tokenizer(f" {code}.").input_ids
    return asked + told, [-100] * len(asked) + told


@pytest.fixture(scope="module")
def tasks(tuned: Path) -> Path:
    file = tuned.parent / "codes.jsonl"
    header = {"task": "codes", "format": "raw", "maxTokens": 4, "stop": ["."]}
    items = [{"prompt": prompt(word), "answer": code} for word, code in CODES.items()]
    file.write_text("\n".join(map(json.dumps, [header, *items])))
    return file


@pytest.fixture(autouse=True)
def forgotten(cluster: Cluster) -> Iterator[None]:
    """Others use the same cluster."""
    yield
    for calls in ("deployments", "models"):
        if NAME in {view["model"] for view in cluster.get(f"/{calls}")[calls]}:
            cluster.perform("DELETE", f"/{calls}/{NAME}")


def register(cluster: Cluster, tuned: Path, tasks: Path) -> str:
    texts = tuned.parent / "texts.txt"
    texts.write_text("\n\n".join(f"{prompt(word)} {code}." for word, code in CODES.items()))
    compression = {"method": "deltacompress", "bits": 4, "calibration": str(texts), "evaluation": str(tasks)}
    body = {"model": NAME, "source": str(tuned), "base": BASE, "compression": compression}
    return cluster.submit("POST", "/register_model", body)


def compressor(cluster: Cluster) -> psutil.Process:
    """The compressor's process. Its niceness gives engines priority; without it, other tests do not delay it.

    Only command lines are read: this is called several times a second.
    """
    found = [
        p for p in psutil.process_iter() if all(part in title(p) for part in (COMPRESSING, str(cluster.home)))
    ]
    assert len(found) == 1, f"expected one compressor, got {[(p.pid, title(p)) for p in found]}"
    with contextlib.suppress(psutil.Error):
        found[0].nice(0)
    return found[0]


def stopped_at_share(cluster: Cluster, share: float) -> psutil.Process:
    """Wait until the compressor has done this share of its work. Return its process, which stands still: a
    signal or the end of the controller then comes at this share, on any machine.
    """

    def reached() -> psutil.Process:
        process = compressor(cluster)
        try:
            process.suspend()
            view = cluster.get(f"/models/{NAME}")
        except psutil.NoSuchProcess as e:
            raise AssertionError("the compressor ended meanwhile") from e
        compression = view.get("compression") or {}
        if view["phase"] != "Compressing" or compression.get("share", 0.0) < share:
            process.resume()
            raise AssertionError(view)
        return process

    process: psutil.Process = until(reached, f"{share:.0%} of the work")
    return process


def is_done(cluster: Cluster, operation: str) -> bool:
    return bool(cluster.get(f"/operations/{operation}")["done"])


def test_a_fine_tune_is_compressed_through_kills_and_answers_as_itself(
    cluster: Cluster, tuned: Path, tasks: Path
) -> None:
    operation = register(cluster, tuned, tasks)
    first = stopped_at_share(cluster, 0.1)
    first.kill()
    second = stopped_at_share(cluster, 0.3)
    assert second.pid != first.pid
    controller = cluster.replica("ostinato", "Controller")
    controller.kill()
    controller.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        second.resume()
    until(lambda: is_done(cluster, operation) or compressor(cluster).pid != second.pid, "another")
    ended = cluster.finish(operation)
    assert ended["phase"] == "Ready"
    model = cluster.get(f"/models/{NAME}")
    made = model["compression"]["artifact"]
    assert model["kind"] == "sparse_delta"
    assert made["ratio"] > 3
    (loss,) = made["quality"]["losses"]
    assert loss["before"] == 1.0, "the fine-tune knows all code words"
    accuracy = made["quality"]["accuracy"]
    assert accuracy >= 75
    assert model["compressionTechnique"] == {"none": accuracy}
    if accuracy < 100:
        refused = cluster.http.post(
            "/deploy_model", json={"model": NAME, "intent": "accSLO", "SLOs": {"accuracy": 100}}
        )
        assert refused.json()["error"]["code"] == "no_feasible_plan"
    limits = {"intent": "accSLO", "SLOs": {"accuracy": accuracy}, "maxOutputLength": 16}
    cluster.perform("POST", "/deploy_model", {"model": NAME, **limits})
    answers = {name: [said(cluster, name, word) for word in CODES] for name in (NAME, BASE)}
    wanted = said_by(tuned)
    alike = {name: sum(a == b for a, b in zip(texts, wanted, strict=True)) for name, texts in answers.items()}
    assert alike[NAME] >= len(CODES) * accuracy / 100 - 1, answers
    assert alike[BASE] <= len(CODES) // 3, answers


def test_a_model_that_is_deleted_while_it_is_compressed_leaves_no_files(
    cluster: Cluster, tuned: Path, tasks: Path
) -> None:
    operation = register(cluster, tuned, tasks)
    stopped_at_share(cluster, 0.05)
    cluster.perform("DELETE", f"/models/{NAME}")
    assert cluster.get(f"/operations/{operation}")["phase"] == "Cancelled"
    assert not [p for p in cluster.processes() if COMPRESSING in title(p)]
    assert not list((cluster.home / "artifacts").glob(f"{NAME}-*"))


def said(cluster: Cluster, model: str, word: str) -> str:
    body = {"model": model, "prompt": prompt(word), "max_tokens": 3, "temperature": 0}
    reply = cluster.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return first_word(reply.json()["choices"][0]["text"])


def said_by(folder: Path) -> list[str]:
    """The uncompressed fine-tune's answers, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for word in CODES:
        ids = tokenizer(prompt(word), return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=3, do_sample=False)
        texts.append(first_word(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)))
    return texts


def first_word(text: str) -> str:
    return text.strip().partition(" ")[0].partition(".")[0]
