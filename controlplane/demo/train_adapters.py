"""Makes the demo's two adapters: `data` generates the problems, `train` fits LoRA, `evaluate` measures.

    python -m controlplane.demo.train_adapters data build/demo
    python -m controlplane.demo.train_adapters train kinship --model MODEL --data build/demo \\
        --out build/adapters
    python -m controlplane.demo.train_adapters evaluate kinship --model MODEL --data build/demo \\
        --adapter build/adapters/kinship --report build/kinship.json

`data` needs reasoning-gym, `train` needs peft; MODEL is what
`python -m workers.bundled smollm2-135m-instruct DIR` prints.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from controlplane.demo.tasks import BASE, TASKS

TRAIN_SEED, HELDOUT_SEED = 20_001, 90_001
TRAIN_SIZE, HELDOUT_SIZE, SHIPPED = 40_000, 400, 12
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """The recipe that generates one task's problems and trains its adapter."""

    dataset: str
    rank: int
    modules: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1200
    batch: int = 96
    learning_rate: float = 2e-3
    skip: str = ""  # problems whose answer contains this are left out


RECIPES = {
    # reasoning-gym 0.1.25 answers in-law questions the wrong way round (a daughter-in-law is "father-in-law")
    "kinship": Recipe("family_relationships", 8, ATTENTION, skip="-in-law"),
    "arithmetic": Recipe("chain_sum", 4, EVERY_LINEAR, {"min_terms": 2, "max_terms": 4, "max_digits": 2}),
}


@dataclass(frozen=True)
class Row:
    prompt: str
    answer: str


# --- data ---------------------------------------------------------------------------------------------


def make_data(name: str, folder: Path) -> None:
    """Write `train.jsonl` and `heldout.jsonl`; no training prompt equals a held-out one."""
    recipe = RECIPES[name]
    heldout = list(_unique(recipe, HELDOUT_SEED, HELDOUT_SIZE * 2, set()))[:HELDOUT_SIZE]
    train = list(_unique(recipe, TRAIN_SEED, TRAIN_SIZE, {row.prompt for row in heldout}))
    (folder / name).mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("heldout", heldout)):
        lines = [json.dumps(asdict(row)) for row in rows]
        (folder / name / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(train)} training and {len(heldout)} held-out problems")


def _unique(recipe: Recipe, seed: int, size: int, taken: set[str]) -> Iterator[Row]:
    import reasoning_gym

    seen = set(taken)
    for item in reasoning_gym.create_dataset(recipe.dataset, seed=seed, size=size, **recipe.options):
        row = Row(item["question"].strip(), item["answer"].strip())
        if row.prompt not in seen and not (recipe.skip and recipe.skip in row.answer):
            seen.add(row.prompt)
            yield row


def read_rows(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


# --- training -----------------------------------------------------------------------------------------


def train(name: str, model_dir: Path, data: Path, out: Path, steps: int) -> None:
    """Fit the adapter and write a PEFT folder `out/name` in bfloat16, with `name.training.json` next to
    it."""
    import torch

    recipe, device = RECIPES[name], _device()
    torch.manual_seed(1)
    tokenizer, base = load(model_dir, device, torch.bfloat16)
    model = _with_lora(base, recipe)
    rows = [_encode(tokenizer, row) for row in read_rows(data / name / "train.jsonl")]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_cosine(step, steps))
    batches, started = _batches(rows, recipe.batch), time.monotonic()
    for step in range(steps):
        loss = model(**_tensors(next(batches), tokenizer.pad_token_id, device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"{name} {step} loss {loss.item():.4f}, {time.monotonic() - started:.0f}s", flush=True)
    _save(model, out / name)
    figures = {"steps": steps, "seconds": round(time.monotonic() - started, 1), "final_loss": loss.item()}
    report = {**recipe_facts(name), **figures, **environment()}
    (out / f"{name}.training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def load(model_dir: Path, device: str, dtype: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device)
    return tokenizer, model


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _with_lora(base: Any, recipe: Recipe) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=list(recipe.modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)  # keeps A and B in float32 over the bfloat16 base


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids that a chat completion makes from this single user message with the template."""
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _encode(tokenizer: Any, row: Row) -> tuple[list[int], int]:
    head = prompt_ids(tokenizer, row.prompt)
    tail = tokenizer(row.answer, add_special_tokens=False)["input_ids"]
    return [*head, *tail, tokenizer.eos_token_id], len(head)


def _batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    """Endless shuffled batches, each of rows of similar length, so that little is padding."""
    shuffle = random.Random(1)
    while True:
        order = sorted(rows, key=lambda row: (len(row[0]) // 8, shuffle.random()))
        groups = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
        shuffle.shuffle(groups)
        yield from groups


def _tensors(batch: list[tuple[list[int], int]], pad: int, device: str) -> dict[str, Any]:
    import torch

    width = max(len(ids) for ids, _ in batch)
    ids = torch.full((len(batch), width), pad)
    labels = torch.full((len(batch), width), -100)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for at, (tokens, head) in enumerate(batch):
        ids[at, : len(tokens)] = torch.tensor(tokens)
        labels[at, head : len(tokens)] = torch.tensor(tokens[head:])
        mask[at, : len(tokens)] = 1
    return {"input_ids": ids.to(device), "labels": labels.to(device), "attention_mask": mask.to(device)}


def _warm_cosine(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _save(model: Any, folder: Path) -> None:
    """Write the standard PEFT folder, but smaller: bfloat16 weights, and the base's name instead of a
    path."""
    import torch
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    small = {key: value.to(torch.bfloat16) for key, value in weights.items()}
    save_file(small, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "base_model_name_or_path": BASE}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").unlink(missing_ok=True)


# --- evaluation ---------------------------------------------------------------------------------------


def evaluate(name: str, model_dir: Path, data: Path, adapter: Path, limit: int) -> dict[str, Any]:
    """Held-out scores of the base, and of the base with the adapter merged in; float32, greedy."""
    import torch

    rows = read_rows(data / name / "heldout.jsonl")[:limit]
    tokenizer, model = load(model_dir, _device(), torch.float32)
    base = score(name, rows, generate(tokenizer, model, [row.prompt for row in rows]))
    merge(model, adapter)
    tuned = score(name, rows, generate(tokenizer, model, [row.prompt for row in rows]))
    return {"task": name, "problems": len(rows), "base": base, "adapter": tuned, **environment()}


def score(name: str, rows: list[Row], replies: list[str]) -> dict[str, Any]:
    """Scores of replies. `normalised` is the demo's measure; `verbatim` requires a reply that is exactly
    the answer."""
    right = [TASKS[name].is_right(reply, row.answer) for row, reply in zip(rows, replies, strict=True)]
    verbatim = [reply.strip() == row.answer for row, reply in zip(rows, replies, strict=True)]
    shown = list(zip(rows, replies, strict=True))[:4]
    return {
        "normalised": sum(right) / len(rows),
        "verbatim": sum(verbatim) / len(rows),
        "examples": [{**asdict(row), "reply": reply} for row, reply in shown],
    }


def generate(tokenizer: Any, model: Any, prompts: list[str], max_tokens: int = 64) -> list[str]:
    """Greedy replies to the prompts, in batches of 100."""
    import torch

    replies: list[str] = []
    tokenizer.padding_side = "left"
    for at in range(0, len(prompts), 100):
        ids = [prompt_ids(tokenizer, prompt) for prompt in prompts[at : at + 100]]
        inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        replies += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def merge(model: Any, adapter: Path) -> None:
    """Add alpha / r * B A to every adapted weight, without peft, in the way Ostinato reads the folder."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    weights = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for key in [key for key in weights if key.endswith(".lora_A.weight")]:
        down, up = weights[key].float(), weights[key.replace("lora_A", "lora_B")].float()
        target = modules[key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")].weight
        with torch.no_grad():
            target += (config["lora_alpha"] / config["r"] * (up @ down)).to(target)


def ship(name: str, data: Path, folder: Path) -> None:
    """Write the demo's problems, the first of the held-out problems, next to the adapter."""
    rows = read_rows(data / name / "heldout.jsonl")[:SHIPPED]
    text = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    (folder / name / "heldout.json").write_text(text, encoding="utf-8")


def recipe_facts(name: str) -> dict[str, Any]:
    recipe = asdict(RECIPES[name])
    seeds = {"train": TRAIN_SEED, "heldout": HELDOUT_SEED}
    return {"task": name, "recipe": recipe, "lora_alpha": 2 * RECIPES[name].rank, "seeds": seeds}


def environment() -> dict[str, Any]:
    import torch

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"machine": machine, "versions": {**versions, "transformers": version("transformers")}}


# --- command line -------------------------------------------------------------------------------------


def main() -> None:
    """See the module's docstring."""
    args = _parser().parse_args()
    match args.command:
        case "data":
            for name in RECIPES:
                make_data(name, args.folder)
        case "train":
            train(args.task, args.model, args.data, args.out, args.steps or RECIPES[args.task].steps)
        case "evaluate":
            report = evaluate(args.task, args.model, args.data, args.adapter, args.limit)
            args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(args.task, report["base"]["normalised"], "->", report["adapter"]["normalised"])
        case "ship":
            ship(args.task, args.data, args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make the demo's adapters.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data").add_argument("folder", type=Path)
    for command in ("train", "evaluate", "ship"):
        sub = commands.add_parser(command)
        sub.add_argument("task", choices=RECIPES)
        sub.add_argument("--data", type=Path, required=True)
        if command != "ship":
            sub.add_argument("--model", type=Path, required=True)
        if command != "evaluate":
            sub.add_argument("--out", type=Path, required=True)
    commands.choices["train"].add_argument("--steps", type=int)
    commands.choices["evaluate"].add_argument("--adapter", type=Path, required=True)
    commands.choices["evaluate"].add_argument("--report", type=Path, required=True)
    commands.choices["evaluate"].add_argument("--limit", type=int, default=HELDOUT_SIZE)
    return parser


if __name__ == "__main__":
    main()
