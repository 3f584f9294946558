"""Commands that repair a model's folder, for error messages: each can be pasted into a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path

INDEX = "model.safetensors.index.json"
REPO = "(REPO is the model's name on Hugging Face, such as Qwen/Qwen3-8B)"
ADAPTER_REPO = "(REPO is the name of the adapter's own repository on Hugging Face, not that of its base)"


def quoted(path: Path, ending: str = "") -> str:
    return shlex.quote(f"{path}{ending}")


def download(folder: Path, *files: str, of_adapter: bool = False) -> str:
    """Fetch `files`, or all files that are missing or differ, from Hugging Face; Ostinato installs `hf`."""
    wanted = "".join(f" {shlex.quote(file)}" for file in files)
    return f"`hf download REPO{wanted} --local-dir {quoted(folder)}` {ADAPTER_REPO if of_adapter else REPO}"


def set_aside(path: Path) -> str:
    """Rename a file so that no loader reads it."""
    return f"`mv {quoted(path)} {quoted(path, '.unused')}`"


def rename_file(folder: Path, old: str, new: str) -> str:
    return f"`mv {quoted(folder / old)} {quoted(folder / new)}`"


def register(folder: Path, ending: str = "", *, options: str = "") -> str:
    return f"`ostinato register NAME {quoted(folder, ending)}{options}`"


def register_variant(folder: Path) -> str:
    return f"`ostinato register NAME --base BASE --adapter {quoted(folder)}`"


def save_again(folder: Path, options: str = "") -> str:
    """Load the model with transformers, with `options`, and write it to a folder next to this one."""
    return _saved_again(folder, f"M.from_pretrained(old{options}).save_pretrained(new)")


def split_experts(folder: Path) -> str:
    """Write the model with its experts one by one.

    save_pretrained always writes fused experts for a model that was read from fused experts. A new model
    with the same weights is written with separate experts.
    """
    return _saved_again(
        folder,
        "a = M.from_pretrained(old); b = M.from_config(a.config, dtype=a.dtype); "
        "b.load_state_dict(a.state_dict()); b.save_pretrained(new)",
    )


def with_head(folder: Path) -> str:
    """Write the model that AutoModel saved, with the head of the model that its training began with."""
    code = (
        "import sys; from transformers import AutoModel as A, AutoModelForCausalLM as M, AutoTokenizer as T; "
        "_, base, old, new = sys.argv; m = M.from_pretrained(base); "
        "setattr(m, m.base_model_prefix, A.from_pretrained(old)); m.save_pretrained(new); "
        "T.from_pretrained(old).save_pretrained(new)"
    )
    new = quoted(folder, "-saved")
    return f'`python -c "{code}" BASE {quoted(folder)} {new}`, then {register(folder, "-saved")}'


def _saved_again(folder: Path, saving: str) -> str:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"_, old, new = sys.argv; {saving}; T.from_pretrained(old).save_pretrained(new)"
    )
    new = f"{folder}-saved"
    return f'`python -c "{code}" {quoted(folder)} {shlex.quote(new)}`, then {register(folder, "-saved")}'


def rename_tensors(folder: Path, files: Collection[str], old: str, new: str) -> str:
    """Replace the first `old` in every tensor's name. Each file is rewritten in place.

    If there are several files, their index is changed, too; there only the start of a name can be replaced.
    """
    code = (
        "import sys; from safetensors.torch import load_file, save_file; "
        f"[save_file({{n.replace('{old}', '{new}', 1): v.clone() for n, v in load_file(f).items()}}, f, "
        "{'format': 'pt'}) for f in sys.argv[1:]]"
    )
    if len(files) == 1:
        return f'`python -c "{code}" {quoted(folder / min(files))}`'
    index = f"sed -i 's/\"{re.escape(old)}/\"{new}/g' {quoted(folder / INDEX)}"
    return f'`python -c "{code}" {quoted(folder)}/model-*.safetensors`, then `{index}`'


def count_tokens(folder: Path) -> str:
    code = (
        "import sys; from transformers import AutoTokenizer as T; print(len(T.from_pretrained(sys.argv[1])))"
    )
    return f'`python -c "{code}" {quoted(folder)}`'


def without_metadata(file: Path) -> str:
    """Take the metadata out of a safetensors file, in place: the header keeps its length."""
    code = (
        "import json, sys; f = open(sys.argv[1], 'r+b'); n = int.from_bytes(f.read(8), 'little'); "
        "h = json.loads(f.read(n)); del h['__metadata__']; "
        "t = json.dumps(h, separators=(',', ':'), ensure_ascii=False).encode().ljust(n); "
        "assert len(t) == n; f.seek(8); f.write(t)"
    )
    return f'`python -c "{code}" {quoted(file)}`'


def rename_biases(file: Path) -> str:
    """Give the biases of adapted modules the names that PEFT reads since 0.6."""
    code = (
        "import sys; from safetensors.torch import load_file, save_file; f = sys.argv[1]; t = load_file(f); "
        "save_file({n[:-4] + 'base_layer.bias' if n.endswith('.bias') and n[:-4] + 'lora_A.weight' in t "
        "else n: v.clone() for n, v in t.items()}, f, {'format': 'pt'})"
    )
    return f'`python -c "{code}" {quoted(file)}`'


def adapter_from_pickle(old: Path, new: Path) -> str:
    """Convert an adapter's pickle to safetensors; only tensors are read from the pickle, its code never
    runs."""
    code = (
        "import sys, torch; from safetensors.torch import save_file; "
        "t = torch.load(sys.argv[1], weights_only=True); "
        "save_file({n: v.contiguous() for n, v in t.items()}, sys.argv[2], {'format': 'pt'})"
    )
    return f'`python -c "{code}" {quoted(old)} {quoted(new)}`'


def merge(folder: Path, *, own_tokenizer: bool, rows: int | None = None, then: str = "") -> str:
    """Merge the adapter in `folder` into the base that its config names, and register the result.

    The tokenizer is the adapter's, if its folder has one, else the base's. With `rows` the base's embedding
    and head get that many rows first. `then` is a step before the registration.
    """
    words = "old" if own_tokenizer else "m.peft_config['default'].base_model_name_or_path"
    names, more, load = "AutoPeftModelForCausalLM as P", "", "m = P.from_pretrained(old)"
    if rows is not None:
        names, more = "PeftConfig as C, PeftModel as P", "AutoModelForCausalLM as M, "
        load = (
            "b = M.from_pretrained(C.from_pretrained(old).base_model_name_or_path); "
            f"b.resize_token_embeddings({rows}); m = P.from_pretrained(b, old)"
        )
    code = (
        f"import sys; from peft import {names}; from transformers import {more}AutoTokenizer as T; "
        f"_, old, new = sys.argv; {load}; T.from_pretrained({words})"
        ".save_pretrained(new); m.merge_and_unload().save_pretrained(new)"
    )
    return (
        f'`pip install peft`, then `python -c "{code}" {quoted(folder)} {quoted(folder, "-merged")}`, '
        f"{then}then {register(folder, '-merged')}"
    )
