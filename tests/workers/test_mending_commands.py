"""The commands in refusals, pasted as they are: each makes a folder that is then served."""

from __future__ import annotations

import glob
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from testkit import adapter_layouts, base_layouts
from testkit.adapter_layouts import SIZES
from testkit.tiny_families import SIZES as BASE_SIZES
from testkit.tiny_families import Tiny

LIMITS = VariantLimits(64)
HERE = ("python ", "mv ", "mkdir ", "sed ")  # the programs of commands that need no network
# The layout, the first command that can run here, and the ending of the folder that is then registered.
BASES = {
    "one file and the shards of an index": "",
    "a pickle alone": "-saved",
    "a variant of precision alone": "",
    "another name alone": "",
    "an adapter and a whole model": "",
    "cast to fp8": "-saved",
    "float64": "-saved",
    "scales of an fp8 KV cache": "-saved",
    "a value head": "-saved",
    "torch.compile's names": "",
    "DataParallel's names": "",
    "PEFT's names": "",
    "a language model's names within another": "",
    "fused experts": "-saved",
    "metadata that is no text": "",
    "a sentence-transformers folder": "",
    "a byte-order mark": "",
}
ADAPTERS = (
    "a state_dict's names",
    "torch.compile's names",
    "names of a model for images",
    "no prefix of PEFT",
    "AutoModel's names",
)


def run(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the first command of `message` that needs no network. Python's code runs in this process."""
    command = next(text for text in re.findall(r"`([^`]+)`", message) if text.startswith(HERE))
    if not command.startswith("python "):
        subprocess.run(command, shell=True, check=True)
        return
    _, flag, code, *arguments = shlex.split(command)
    assert flag == "-c"
    monkeypatch.setattr(sys, "argv", ["-c", *(path for a in arguments for path in glob.glob(a) or [a])])
    exec(code, {})


def with_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_model(folder)
    return str(refused.value)


@pytest.mark.parametrize("name", BASES)
def test_a_base_is_mended_by_the_command_of_its_refusal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = base_layouts.REFUSED[name][0](tmp_path / "with a space" / "model")
    with_tokenizer(folder)
    run(refusal(folder), monkeypatch)
    assert (
        read_model(folder.with_name(f"{folder.name}{BASES[name]}")).num_layers
        == BASE_SIZES["num_hidden_layers"]
    )


def test_names_in_shards_are_mended_with_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base_layouts.sharded(tmp_path / "model")
    index = folder / base_layouts.INDEX
    for path in base_layouts.shards_of(folder):
        wrapped = {f"_orig_mod.{name}": tensor for name, tensor in load_file(path).items()}
        save_file(wrapped, path, metadata={"format": "pt"})
    plain_index = index.read_text()
    index.write_text(plain_index.replace('"model.', '"_orig_mod.model.').replace('"lm_', '"_orig_mod.lm_'))
    message = refusal(folder)
    run(message, monkeypatch)
    run(message[message.index("`sed") :], monkeypatch)
    assert read_model(folder).num_layers == BASE_SIZES["num_hidden_layers"]
    assert index.read_text() == plain_index


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = Tiny("Llama", SIZES).write(tmp_path_factory.mktemp("base") / "base")
    with_tokenizer(folder)
    return folder


def refusal_of_adapter(folder: Path, base: Path) -> str:
    with pytest.raises((AdapterError, CheckpointError)) as refused:
        read_manifest(folder, read_model(base), LIMITS)
    return str(refused.value)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_mended_by_the_command_of_its_refusal(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter_layouts.REFUSED[name][0](tmp_path / "adapter")
    run(refusal_of_adapter(folder, base), monkeypatch)
    read_manifest(folder, read_model(base), LIMITS)


def test_an_adapter_in_a_pickle_is_written_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter_layouts.write(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    torch.save(held := load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    run(refusal_of_adapter(folder, base), monkeypatch)
    read_manifest(folder, read_model(base), LIMITS)
    written: dict[str, Any] = load_file(weights)
    assert all(torch.equal(written[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_an_adapter_that_is_not_served_is_merged(
    own_tokenizer: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its embedding was trained, which only a merged model can say."""
    trained = adapter_layouts.also(model__embed_tokens__weight=(96, 128))
    folder = adapter_layouts.write(tmp_path / "adapter", tensors=trained, base_model_name_or_path=str(base))
    if own_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base / name, folder)
    run(refusal_of_adapter(folder, base), monkeypatch)
    merged = tmp_path / "adapter-merged"
    assert read_model(merged).vocab_size == 96
    assert (merged / "tokenizer.json").is_file()
    assert load_file(merged / "model.safetensors")["model.embed_tokens.weight"].eq(1).all()


def test_an_adapter_with_added_tokens_is_merged_into_a_resized_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = adapter_layouts.also(model__embed_tokens__weight=(100, 128), lm_head__weight=(100, 128))
    folder = adapter_layouts.write(tmp_path / "adapter", tensors=rows, base_model_name_or_path=str(base))
    message = refusal_of_adapter(folder, base)
    assert "copy tokenizer.json and tokenizer_config.json of the training" in message
    run(message, monkeypatch)
    assert read_model(merged := tmp_path / "adapter-merged").vocab_size == 100
    assert load_file(merged / "model.safetensors")["lm_head.weight"].eq(1).all()
    with_tokenizer(folder)
    assert "copy tokenizer.json" not in refusal_of_adapter(folder, base)


def test_biases_under_older_names_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT leaves out the bias of an adapted module unless its name has base_layer in it."""
    torch.manual_seed(1)
    base = Tiny("Qwen2", SIZES).write(tmp_path / "base")
    with_tokenizer(base)
    biases = adapter_layouts.also(
        model__layers__0__self_attn__q_proj__bias=(128,), model__layers__0__self_attn__k_proj__bias=(64,)
    )
    folder = adapter_layouts.write(tmp_path / "adapter", tensors=biases, base_model_name_or_path=str(base))
    message = refusal_of_adapter(folder, base)
    run(message, monkeypatch)
    run(message[message.index("`pip") :], monkeypatch)
    merged = load_file(tmp_path / "adapter-merged" / "model.safetensors")
    assert all(merged[f"model.layers.0.self_attn.{m}_proj.bias"].eq(1).all() for m in "qk")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_of_a_changed_base_is_merged_as_it_was_trained(
    init: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data += torch.randn_like(weight) * 0.1
    model.save_pretrained(tmp_path / "adapter")
    run(refusal_of_adapter(tmp_path / "adapter", base), monkeypatch)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter-merged", dtype=torch.float32)
    ids = torch.tensor([[5, 17, 33, 60, 8]])
    with torch.inference_mode():
        assert (model(ids).logits - merged(ids).logits).abs().max() < 1e-3


def test_a_model_without_its_head_gets_the_head_of_its_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModel.from_pretrained(base).save_pretrained(tmp_path / "body")
    with_tokenizer(tmp_path / "body")
    config = tmp_path / "body" / "config.json"
    config.write_text(config.read_text().replace('"LlamaModel"', '"LlamaForCausalLM"'))
    run(refusal(tmp_path / "body").replace('" BASE ', f'" {base} '), monkeypatch)
    assert read_model(tmp_path / "body-saved").vocab_size == 96
    head, saved = (load_file(f / "model.safetensors") for f in (base, tmp_path / "body-saved"))
    assert torch.equal(head["lm_head.weight"], saved["lm_head.weight"])


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"])
def test_prompt_vectors_are_not_called_mergeable(kind: str, base: Path, tmp_path: Path) -> None:
    message = refusal_of_adapter(adapter_layouts.write(tmp_path / "adapter", peft_type=kind), base)
    assert "train a LoRA" in message
    assert "merge_and_unload" not in message


def test_a_refusal_names_the_base_that_an_adapter_was_trained_on(base: Path, tmp_path: Path) -> None:
    folder = adapter_layouts.write(tmp_path / "adapter", tensors=adapter_layouts.weights(layers=(0, 1, 2)))
    message = refusal_of_adapter(folder, base)
    assert message.endswith("the base that it was trained on (adapter_config.json names some/base)")
    assert message.startswith(f"{folder}/adapter_model.safetensors: ")
