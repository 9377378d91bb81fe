"""LoRA on a trained drafter: adapt it to a domain or to a tuned target, then merge it back into plain weights."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
ADAPTER_FILE = "lora.safetensors"


def add_lora(drafter: nn.Module, rank: int, alpha: float | None = None, dropout: float = 0.0) -> None:
    """Put LoRA layers of `rank` into attention, MLP and `fc`, in place, and freeze everything else.

    Args:
        alpha: the LoRA scale is alpha / rank; None: alpha = 2 rank.

    Raises:
        ImportError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("LoRA needs the package 'peft': pip install 'dspine-hf[train]'.") from error
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha if alpha is not None else 2 * rank,
        lora_dropout=dropout,
        target_modules=TARGET_MODULES,
    )
    inject_adapter_in_model(config, drafter)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_("lora_" in name)


def is_adapted(drafter: nn.Module) -> bool:
    """Whether the drafter carries LoRA layers."""
    return any("lora_" in name for name, _ in drafter.named_parameters())


def merged_copy(drafter: nn.Module) -> Any:
    """A copy on the CPU whose LoRA layers are added into the weights that they adapt."""
    result = copy.deepcopy(drafter).to("cpu")
    for name, module in list(result.named_modules()):
        if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(result.get_submodule(parent), child, module.get_base_layer())
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in vars(result):
            delattr(result, name)
    return result.requires_grad_(True)


def save_adapter(drafter: nn.Module, folder: Path) -> None:
    """Write the LoRA weights alone, so that training goes on from exactly them."""
    weights = {n: p.detach().cpu().contiguous() for n, p in drafter.named_parameters() if "lora_" in n}
    save_file(weights, folder / ADAPTER_FILE)


def load_adapter(drafter: nn.Module, folder: Path) -> None:
    """Read back what [`save_adapter`] wrote.

    Raises:
        FileNotFoundError: the checkpoint holds no LoRA weights.
    """
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"expected {ADAPTER_FILE} in '{folder}'; found none: that checkpoint was trained without --lora. "
            "Use another --output-dir."
        )
    saved = load_file(file)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name in saved:
                parameter.copy_(saved[name])
