"""Commands that mend a folder, as messages give them: each can be pasted into a shell as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path

INDEX = "model.safetensors.index.json"
REPO = "(REPO is the model's name on Hugging Face, such as Qwen/Qwen3-8B)"


def quoted(path: Path, ending: str = "") -> str:
    return shlex.quote(f"{path}{ending}")


def download(folder: Path, *files: str) -> str:
    """Fetch `files`, or all that are missing or differ, from Hugging Face; `hf` comes with Ostinato."""
    wanted = "".join(f" {shlex.quote(file)}" for file in files)
    return f"`hf download REPO{wanted} --local-dir {quoted(folder)}` {REPO}"


def set_aside(path: Path) -> str:
    """No loader reads a file by its new name."""
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

    A model that was read from fused experts is saved with fused ones, whatever save_pretrained is told; a new
    model with the same weights is not.
    """
    return _saved_again(
        folder,
        "a = M.from_pretrained(old); b = M.from_config(a.config, dtype=a.dtype); "
        "b.load_state_dict(a.state_dict()); b.save_pretrained(new)",
    )


def _saved_again(folder: Path, saving: str) -> str:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"_, old, new = sys.argv; {saving}; T.from_pretrained(old).save_pretrained(new)"
    )
    new = f"{folder}-saved"
    return f'`python -c "{code}" {quoted(folder)} {shlex.quote(new)}`, then {register(folder, "-saved")}'


def rename_tensors(folder: Path, files: Collection[str], old: str, new: str) -> str:
    """Replace the first `old` in every tensor's name. Each file is written again in its place.

    Several files have an index. There, only what names begin with can be replaced.
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


def adapter_from_pickle(old: Path, new: Path) -> str:
    """Only tensors are read from the pickle, and no code of it runs."""
    code = (
        "import sys, torch; from safetensors.torch import save_file; "
        "t = torch.load(sys.argv[1], weights_only=True); "
        "save_file({n: v.contiguous() for n, v in t.items()}, sys.argv[2], {'format': 'pt'})"
    )
    return f'`python -c "{code}" {quoted(old)} {quoted(new)}`'


def merge(folder: Path, *, own_tokenizer: bool) -> str:
    """Merge the adapter in `folder` into the base that its config names. The tokenizer is the adapter's own
    where its folder has one, else the base's."""
    words = "old" if own_tokenizer else "m.peft_config['default'].base_model_name_or_path"
    code = (
        "import sys; from peft import AutoPeftModelForCausalLM as P; from transformers import AutoTokenizer "
        f"as T; _, old, new = sys.argv; m = P.from_pretrained(old); T.from_pretrained({words})"
        ".save_pretrained(new); m.merge_and_unload().save_pretrained(new)"
    )
    return (
        f'`pip install peft`, `python -c "{code}" {quoted(folder)} {quoted(folder, "-merged")}`, then '
        f"{register(folder, '-merged')}"
    )
