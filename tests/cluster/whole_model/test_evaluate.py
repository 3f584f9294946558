"""`ostinato evaluate` of a variant and its base, compared with transformers on merged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from controlplane.cli import main as command
from controlplane.demo.tasks import ADAPTERS, TASKS
from testkit.cluster.clusters import Cluster
from workers.deltas.merge import merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

KINSHIP = TASKS["kinship"]
ITEMS = len(KINSHIP.problems)
TALES = (
    "Once upon a time, in a village by the sea, there lived an old fisherman.",
    "The capital of France is Paris, and its river is the Seine.",
)
PICK = [
    {"prompt": "The capital of France is", "choices": [" a banana.", " Paris.", " seven."], "answer": 1},
    {"prompt": "Two and two make", "choices": [" four.", " purple."], "answer": 0},
]
# The engine computes in bfloat16, transformers here in float32.
NEAR = 0.03


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    header = {"task": "kinship", "maxTokens": KINSHIP.max_tokens, "normalise": "last_word", "format": "chat"}
    asked = [{"prompt": p.prompt, "answer": p.answer} for p in KINSHIP.problems]
    texts = [{"text": text} for text in TALES]
    files: dict[str, list[Any]] = {"kinship": [header, *asked], "pick": PICK, "tales": texts}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def evaluated(
    whole: Cluster, capfd: pytest.CaptureFixture[str], *argv: str
) -> dict[tuple[str, str], dict[str, Any]]:
    """Figures by task and metric."""
    code = command.run(["--url", whole.url, "evaluate", *argv, "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return {(each["task"], each["metric"]): each for each in json.loads(out)["evaluations"]}


def logprobs(folder: Path, text: str) -> tuple[list[int], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    with torch.no_grad():
        return ids, model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def test_a_variant_is_evaluated_together_with_its_base(
    whole: Cluster, smollm2_folder: Path, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = evaluated(whole, capfd, "smol", str(tasks))
    tuned = evaluated(whole, capfd, "kinship", str(tasks), "--reference", "smol")
    share = {
        name: found["kinship", "exact_match"]["value"] for name, found in {"b": base, "t": tuned}.items()
    }
    replies = [
        whole.http.post(
            "/v1/chat/completions",
            json={
                "model": "kinship",
                "messages": [{"role": "user", "content": problem.prompt}],
                "temperature": 0,
                "max_tokens": KINSHIP.max_tokens,
            },
        ).json()["choices"][0]["message"]["content"]
        for problem in KINSHIP.problems
    ]
    right = sum(KINSHIP.is_right(r, p.answer) for r, p in zip(replies, KINSHIP.problems, strict=True))
    assert share["t"] == pytest.approx(right / ITEMS, abs=1 / ITEMS)  # batches sum in other orders
    assert share["t"] > share["b"] + 0.2
    assert base["pick", "multiple_choice"]["value"] == 1

    merge(smollm2_folder, ADAPTERS / "kinship", tmp_path / "merged")
    surprise = nats = 0.0
    tokens = 0
    for text in TALES:
        ids, q = logprobs(tmp_path / "merged", text)
        _, p = logprobs(smollm2_folder, text)
        surprise -= sum(float(row[i]) for row, i in zip(q, ids[1:], strict=True))
        nats += float((p.exp() * (p - q)).sum())
        tokens += len(q)
    measured = tuned["tales", "perplexity"]
    assert measured["tokens"] == tokens
    assert measured["value"] == pytest.approx(float(torch.tensor(surprise / tokens).exp()), rel=NEAR)
    divergence = tuned["tales", "kl"]
    assert divergence["reference"] == "smol"
    # A lower bound from the twenty likeliest tokens of each, and most of the whole.
    assert 0.4 * nats / tokens < divergence["value"] < nats / tokens * (1 + NEAR)
    assert 0.3 < divergence["coverage"] < 1

    assert command.run(["--url", whole.url, "describe", "kinship"]) == 0
    shown = capfd.readouterr().out
    assert "kinship: exact match" in shown
    assert "tales: KL from 'smol' at least" in shown
