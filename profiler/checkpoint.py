"""Read a Hugging Face checkpoint folder into a `ModelSpec` without loading any weights.

`config.json` implies the tensors (`profiler.architectures`); the safetensors headers list the stored tensors.
Both must match exactly. MaverIQ's fingerprints assume that all hidden layers are alike (section 5.1), so this
is checked here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler import advice
from profiler.architectures.description import Description, Shapes
from profiler.architectures.registry import describe
from profiler.checkpoint_digest import fingerprint
from profiler.config_corrections import dtype_name
from profiler.equal_tensors import equal
from profiler.errors import CheckpointError
from profiler.files import FLOAT_DTYPES, MAX_CONFIG_BYTES, is_file, read_json, refuse_lookalike, shown
from profiler.linears import EXPERT
from profiler.missing_weights import no_config
from profiler.model_files import small_files
from profiler.model_purpose import check_purpose
from profiler.odd_tensors import UNQUANTIZED, problem, quantization_problem
from profiler.types import ModelSpec, TensorRef
from profiler.weight_files import SINGLE, locate, weight_files

CONFIG_DTYPES = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "float": 4}
BFLOAT16 = ", dtype='bfloat16'"
STORED_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("tekken.json",))
# vLLM 0.26 always uses the embedding as the head of these architectures.
ALWAYS_TIED = ("GemmaForCausalLM", "Gemma2ForCausalLM")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # the latter of old compressed-tensors


def block_of(module: str) -> str:
    """The block that holds an adaptable module: q_proj lies in self_attn, up_proj in mlp."""
    return "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def read_model(folder: Path) -> ModelSpec:
    """Read and check the checkpoint in `folder`; raises CheckpointError.

    Bytes are counted in the data type that config.json names (the engine serves in it), or else in the data
    type that most tensors are stored in.
    """
    where = folder / "config.json"
    if not is_file(where):
        raise CheckpointError(no_config(folder))
    raw = read_json(where, MAX_CONFIG_BYTES)
    check_purpose(folder, raw)
    _check_quantization(raw, folder)
    description, declared = describe(raw, where), declared_dtype_bytes(raw, where)
    _check_tokenizer(folder)
    _check_named_weights(raw, folder)
    tensors = locate(folder)
    description = as_stored(description, tensors, folder)
    expected = dict(_expected(description))
    _check_tensors(description, expected, tensors, folder)
    mark = fingerprint(folder, description.facts(), {name: tensors[name] for name in expected})
    return spec_of(description, declared or _stored_bytes(tensors), mark)


def as_stored(description: Description, tensors: dict[str, TensorRef], folder: Path) -> Description:
    """`description`, untied if the files hold a head that differs from the embedding, whatever the config
    says.

    Newer transformers and vLLM go by the files, too. PEFT writes such a checkpoint when it merges a trained
    head into a tied model. Raises CheckpointError if no engine would load that head.
    """
    head, embedding = tensors.get(description.head), tensors.get(description.embedding)
    if not description.tied or head is None or embedding is None or equal(folder, head, embedding):
        return description
    if description.architecture in ALWAYS_TIED:
        raise CheckpointError(
            f"{folder} holds {description.head}, which differs from {description.embedding}, but vLLM uses"
            f" the embedding as the head of every {description.architecture}; save the model without"
            f" {description.head}, or merge the fine-tune again without training the head"
        )
    return replace(description, tied=False)


def declared_fingerprint(folder: Path) -> str:
    """The fingerprint that earlier versions computed: tied if the config says so, whatever head is stored.

    Raises CheckpointError.
    """
    where = folder / "config.json"
    description = describe(read_json(where, MAX_CONFIG_BYTES), where)
    tensors = locate(folder)
    expected = dict(_expected(description))
    return fingerprint(folder, description.facts(), {name: tensors[name] for name in expected})


def has_own_head(folder: Path) -> bool:
    """Whether the config in `folder` ties the head to the embedding, but the files hold another head.

    Raises CheckpointError.
    """
    where = folder / "config.json"
    described = describe(read_json(where, MAX_CONFIG_BYTES), where)
    return described.tied and not as_stored(described, locate(folder), folder).tied


def expected_tensors(folder: Path) -> Shapes:
    """The shape of every tensor that the config in `folder` implies, by full name. Raises CheckpointError."""
    where = folder / "config.json"
    return dict(_expected(describe(read_json(where), where)))


def spec_of(description: Description, dtype_bytes: int, mark: str = "") -> ModelSpec:
    """The facts that plans and estimates need; `mark` is the checkpoint's fingerprint, if it was computed."""
    heads = description.heads
    return ModelSpec(
        architecture=description.architecture,
        num_layers=description.layers,
        hidden_size=description.hidden,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        vocab_size=description.vocab,
        max_position=description.max_position,
        dtype_bytes=dtype_bytes,
        layer_weight_bytes=description.layer_elements * dtype_bytes,
        other_weight_bytes=description.other_elements * dtype_bytes,
        linear_shapes=description.adaptable_shapes(),
        layer_shapes=description.layer_shapes(),
        other_shapes=description.other_shapes(),
        tied=description.tied,
        fingerprint=mark,
        linears=description.linears,
        layer_prefix=description.layer_prefix,
        embedding=description.embedding,
        head=description.head,
        intermediate_size=description.intermediate,
        sliding_window=description.window.tokens,
        sliding_layers=description.window.layers,
        allreduces_per_layer=description.allreduces,
    )


def declared_dtype_bytes(raw: dict[str, Any], where: Path) -> int | None:
    """Bytes per element of the declared type; transformers 5 writes `dtype`, earlier versions `torch_dtype`.

    None if no type is declared: the type of the stored tensors then counts.
    """
    name = dtype_name(raw)
    if name is None:
        return None
    if not isinstance(name, str) or name not in CONFIG_DTYPES:
        raise CheckpointError(
            f"{where}: expected dtype to be one of {', '.join(CONFIG_DTYPES)}, got {shown(name)}; write "
            '"dtype": "auto" there, which means the stored type of the weights, and register the model again'
        )
    return CONFIG_DTYPES[name]


def _check_quantization(raw: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError if the config says that the weights are quantized."""
    key = next((key for key in QUANTIZATION_KEYS if raw.get(key)), None)
    if key is not None:
        raise CheckpointError(quantization_problem(folder, key, raw[key], locate(folder)))


def _check_named_weights(raw: dict[str, Any], folder: Path) -> None:
    """Refuse a config that names a weight file: transformers reads that file, whatever else is there."""
    named, read = raw.get("transformers_weights"), weight_files(folder)
    if named is not None and named != read[0]:
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers_weights names {shown(named)}, which Ostinato does not "
            f"read; delete transformers_weights from that file{_renaming(folder, named, read[0])}, and "
            "register the model again"
        )


def _renaming(folder: Path, named: Any, read: str) -> str:
    """How to serve the file that transformers would read, if it is in `folder`."""
    plain = isinstance(named, str) and named.endswith(".safetensors") and "/" not in named
    if not plain or not is_file(folder / named):
        return f" (Ostinato then serves {read})"
    return (
        f", and give the file that transformers reads the usual name, unless you know that {read} is right: "
        f"{advice.set_aside(folder / read)} and {advice.rename_file(folder, named, SINGLE)}"
    )


def _check_tokenizer(folder: Path) -> None:
    for name in small_files(folder):
        refuse_lookalike(folder / name)
    if not any(all(is_file(folder / name) for name in names) for names in TOKENIZERS):
        wanted = " or ".join(" with ".join(names) for names in TOKENIZERS)
        raise CheckpointError(
            f"expected a tokenizer ({wanted}) in {folder}, found none; download it with "
            f"{advice.download(folder)}, "
            'or, for a model that you trained, save the tokenizer of its base: `python -c "from transformers '
            "import "
            f"AutoTokenizer as T; T.from_pretrained('BASE').save_pretrained({str(folder)!r})\"`"
        )


def _expected(description: Description) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the files must hold, by its full name."""
    yield from description.other_shapes().items()
    layer = _of_every_expert(description)
    for number in range(description.layers):
        for name, shape in layer.items():
            yield f"{description.layer_prefix}{number}.{name}", shape


def _of_every_expert(description: Description) -> Shapes:
    experts = max((linear.experts for linear in description.linears.values()), default=1)
    shapes: Shapes = {}
    for name, shape in description.layer_shapes().items():
        names = (name.replace(EXPERT, str(e)) for e in range(experts)) if EXPERT in name else (name,)
        shapes.update(dict.fromkeys(names, shape))
    return shapes


def _check_tensors(
    description: Description, expected: Shapes, tensors: dict[str, TensorRef], folder: Path
) -> None:
    if found := problem(description, expected, tensors, folder):
        raise CheckpointError(found)
    for name, shape in expected.items():
        _check_tensor(name, tensors[name], shape, folder)


def _check_tensor(name: str, info: TensorRef, shape: tuple[int, ...], folder: Path) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{name} in {folder} has shape {info.shape}, but by config.json it should have {shape}; correct "
            "config.json, or copy the config.json that was saved with these weights"
        )
    if info.dtype not in FLOAT_DTYPES:
        castable = f"write a copy in bfloat16: {advice.save_again(folder, BFLOAT16)}"
        raise CheckpointError(
            f"{name} in {folder / info.file} has the type {info.dtype}, but only {', '.join(STORED_DTYPES)} "
            f"are served; {castable if info.dtype.startswith('F') else UNQUANTIZED}"
        )


def _stored_bytes(tensors: dict[str, TensorRef]) -> int:
    counts: Counter[str] = Counter()
    for info in tensors.values():
        if info.dtype in STORED_DTYPES:
            counts[info.dtype] += math.prod(info.shape)
    return STORED_DTYPES[max(sorted(counts), key=counts.__getitem__)]
