"""Loads a target by Hub name, folder or GGUF file, and a drafter onto the device and dtype of its target."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .configuration_dspine import DSpineConfig
from .target_dspine import resident


def load_target(
    name_or_path: str | Path, dtype: torch.dtype | str = torch.bfloat16, **model_kwargs: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer.

    Args:
        name_or_path: a Hub name (`org/name`), a folder written by `save_pretrained`, or a `.gguf` file.
        dtype: the dtype of the weights; "auto" keeps the checkpoint's own (fp32 for a GGUF file).
        model_kwargs: passed on to `AutoModelForCausalLM.from_pretrained`, e.g. `device_map`.

    Returns:
        (model, tokenizer), the model in eval mode. The weights of a GGUF file are unpacked into plain tensors.

    Raises:
        FileNotFoundError: a path was given and nothing is there.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        return load_gguf_target(path, dtype, **model_kwargs)
    if path.is_dir():
        name_or_path = path
    elif _looks_like_a_path(str(name_or_path)):
        raise FileNotFoundError(
            f"expected a Hub name (org/name), a model folder or a .gguf file as the target; found nothing at "
            f"'{name_or_path}'. Check the path, or write a Hub name without a leading './' or '/'."
        )
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype, **model_kwargs)
    return model.eval(), AutoTokenizer.from_pretrained(name_or_path)


def load_gguf_target(
    file: Path, dtype: torch.dtype | str = torch.bfloat16, **model_kwargs: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer from one GGUF file, its weights unpacked into plain tensors of `dtype`.

    Returns:
        (model, tokenizer), the model in eval mode. It can be saved, cast and trained like any other.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not file.is_file():
        raise FileNotFoundError(f"expected a GGUF file; found none at '{file}'. Check the path.")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32 if dtype == "auto" else dtype,
        quantization_config=GgufConfig(dequantize=True),
        **{"attn_implementation": "sdpa", **model_kwargs},
    )
    _forget_quantization(model)
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def check_drafter(name_or_path: str | Path) -> str | Path:
    """Make sure, by its config alone, that a drafter is there; returns what to load it by.

    Raises:
        FileNotFoundError: a path was given and no drafter is there.
        ValueError: something else is there.
        OSError: the Hub has no config of this name.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() or _looks_like_a_path(str(name_or_path)):
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"expected a drafter's folder (config.json and *.safetensors) at '{path}'; found no config.json. "
                f"Check the path, or train one with 'dspine train --target ...'."
            )
        name_or_path = path
    found = PreTrainedConfig.get_config_dict(name_or_path)[0].get("model_type")
    if found != DSpineConfig.model_type:
        raise ValueError(
            f"expected a DSpine drafter at '{name_or_path}' (model_type 'dspine'); found model_type {found!r}. Give a "
            "drafter's folder or Hub name, or convert the checkpoint first."
        )
    return name_or_path


def load_drafter(name_or_path: str | Path, target: PreTrainedModel, **model_kwargs: Any) -> PreTrainedModel:
    """Load a drafter in the target's dtype, onto the device of the target's output head, and check that they fit.

    Args:
        name_or_path: a folder or a Hub name. target: the model that it drafts for.
        model_kwargs: passed on to `AutoModel.from_pretrained`, e.g. `use_fused_kernels`.

    Raises:
        FileNotFoundError: a path was given and no drafter is there.
        ValueError: the drafter was made for a target of other shapes.
    """
    drafter = AutoModel.from_pretrained(check_drafter(name_or_path), dtype=target.dtype, **model_kwargs)
    drafter.check_target(target)
    return drafter.to(resident(target.get_output_embeddings(), "weight").device).eval()


def _forget_quantization(model: PreTrainedModel) -> None:
    """Take off the marks that the GGUF loader leaves on a model whose weights are plain tensors again.

    They would make `save_pretrained`, `float()` and `Trainer` refuse it.
    """
    for holder, names in ((model.config, ("quantization_config",)), (model, ("hf_quantizer", "quantization_method"))):
        for name in names:
            if hasattr(holder, name):
                delattr(holder, name)
    model.is_quantized = False


def _looks_like_a_path(name: str) -> bool:
    """Whether a string can only be meant as a path: a Hub name has at most one slash and does not start with one."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
