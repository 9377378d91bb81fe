"""DFlash, DFlash2 and DSpark checkpoints -> a DSpine drafter: DFlash exactly, the others as a start for training."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from .checkpoint import read_json, read_tensors, weight_files
from .configuration_dspine import DSpineConfig, spread_layer_ids
from .modeling_dspine import DSpineDraftModel
from .target_dspine import embedding_fingerprint, refuse_wrong_shapes

COPIED_FIELDS = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "rope_parameters",
    "max_position_embeddings",
)
NEUTRAL_FIELDS = {"injection", "selection", "injection_placement", "rewrite_layers", "transfer_rank", "num_candidates"}
OF_THE_TARGET = re.compile(r"(embed_tokens|lm_head)\.weight$")
OF_THE_METHOD = re.compile(
    r"(candidate_selector|markov_head|confidence_head)\.|layers\.\d+\.(attention_conv|mlp_conv)\.|rotary_emb\."
)


@dataclass
class Conversion:
    """A converted drafter and what became of every tensor.

    Args:
        drafter: in the dtype of the source.
        kind: "dflash", "dflash2" or "dspark".
        exact: whether it drafts what the original drafts, at T = 0.
        taken, dropped, new: names of tensors copied, left out, and made by the conversion.
    """

    drafter: DSpineDraftModel
    kind: str
    exact: bool
    taken: list[str]
    dropped: list[str]
    new: list[str]

    def lines(self) -> list[str]:
        """What a user wants to know, one line each."""
        methods = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
        verdict = "drafts as the original" if self.exact else "a start for training: it does not draft as the original"
        rows = [f"{methods[self.kind]}: {verdict}"]
        for title, names in (("taken", self.taken), ("dropped", self.dropped), ("new", self.new)):
            rows += [f"{title}: {len(names)} tensors", *(f"  {name}" for name in names)]
        return rows


def convert(folder: str | Path, target: Any = None, **overrides: Any) -> Conversion:
    """Read a checkpoint of another block drafter as a DSpine drafter.

    DFlash has no injection, and neither has its conversion unless `injection` is given. What is added to a checkpoint
    writes nothing at first (U = 0): the backbone's drafts stay what they are until they are trained. The convolutions
    of DFlash2, and the anchor slot of DSpark that drafts the first token, have no counterpart: those need training.

    Args:
        folder: config.json and safetensors weights, in the layout of z-lab (DFlash, DFlash2) or DeepSpec (DSpark).
        target: the causal LM that it drafts for. Its embedding is needed for the transfer space of an injection.
        overrides: any field of [`DSpineConfig`], e.g. injection="all", rewrite_layers=4.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: pickled weights, an unknown layout, a feature that DSpine has not, or a target that does not fit.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"expected config.json and *.safetensors at '{folder}'; found no config.json.")
    source = read_json(folder / "config.json")
    tensors = dict(read_tensors(weight_files(folder)))
    kind = _kind(source, tensors)
    if kind != "dflash":
        overrides.setdefault("injection", "all")
    config = _config(source, kind, target, overrides)
    if config.injection != "none" and target is None:
        raise ValueError(
            f"expected the target that this {kind} checkpoint drafts for: the transfer space of "
            f'injection="{config.injection}" is fitted to its embedding; found none. Name it with --target.'
        )
    drafter = DSpineDraftModel(config).eval()
    taken, dropped = _load(drafter, tensors, folder)
    if target is not None:
        _fit(drafter, target)
    drafter.to(next(tensors[name] for name in taken).dtype)
    new = [name for name in drafter.state_dict() if name not in taken]
    exact = kind == "dflash" and set(overrides) <= NEUTRAL_FIELDS
    return Conversion(drafter, kind, exact, taken, dropped, new)


def _kind(source: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    if source.get("model_type") == DSpineConfig.model_type:
        raise ValueError("expected a checkpoint of another method; found a DSpine drafter. Use it as it is.")
    if any(name.startswith("candidate_selector.") for name in tensors):
        return "dflash2"
    if "num_anchors" in source or "markov_rank" in source or any(n.startswith("markov_head.") for n in tensors):
        return "dspark"
    return "dflash"


def _config(source: dict[str, Any], kind: str, target: Any, overrides: dict[str, Any]) -> DSpineConfig:
    """The drafter's config, from the fields of the source's own and of its `dflash_config`."""
    read = {k: v for k, v in source.items() if k not in ("architectures", "auto_map", "model_type", "dtype")}
    qwen = Qwen3Config.from_dict(read)
    inner = source.get("dflash_config") or {}

    def field(name: str, default: Any = None) -> Any:
        return inner.get(name, source.get(name, default))

    _refuse_other_attention(source, qwen, inner)
    layers = field("num_target_layers")
    if layers is None and target is not None:
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
    if layers is None:
        raise ValueError("expected num_target_layers in config.json; found none. Name the target with --target.")
    ids = field("target_layer_ids")
    values = {name: getattr(qwen, name) for name in COPIED_FIELDS}
    values |= {
        "num_target_layers": int(layers),
        "target_layer_ids": spread_layer_ids(layers, qwen.num_hidden_layers) if ids is None else list(map(int, ids)),
        "block_size": int(field("block_size", 16)) + (1 if kind == "dspark" else 0),  # there the anchor drafts too
        "mask_token_id": field("mask_token_id"),
        "logit_scale": float(field("output_multiplier", 1.0)),
        "logit_softcap": float(field("final_logit_softcapping") or 0) or None,
        "embedding_scale": _embedding_scale(float(field("input_embedding_scale", 1.0)), target),
        "transfer_rank": min(128 if qwen.hidden_size < 2048 else 256, qwen.hidden_size),
        "num_candidates": min(16, qwen.vocab_size),
        **{name: source.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        "injection": "none",
        **overrides,
    }
    values.setdefault("selection", "independent" if values["injection"] == "none" else "transition")
    if values["mask_token_id"] is None and "mask_token_id" not in overrides:
        raise ValueError("expected mask_token_id in config.json; found none. This is no DFlash or DSpark checkpoint.")
    return DSpineConfig(**values)


def _refuse_other_attention(source: dict[str, Any], qwen: Qwen3Config, inner: dict[str, Any]) -> None:
    """Raise ValueError for causal or sliding-window layers: a DSpine block sees all of itself and of the context."""
    kinds = set(source.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"} or source.get("is_causal") or inner.get("is_causal"):
        raise ValueError(
            f"expected full, bidirectional attention in every layer; found layer_types {sorted(kinds)}, is_causal="
            f"{source.get('is_causal')}. Such a drafter cannot be converted; train one with 'dspine train'."
        )


@torch.no_grad()
def _embedding_scale(scale: float, target: Any) -> float:
    """DFlash scales the raw embedding rows; DSpine scales what the target's embedding module returns."""
    if target is None:
        if scale != 1.0:
            raise ValueError(
                f"expected the target: this checkpoint scales its embeddings by {scale}, and whether the target's own "
                "module does so is not known without it. Name it with --target."
            )
        return 1.0
    module = target.get_input_embeddings()
    row = torch.tensor([1], device=module.weight.device)
    raw, own = module.weight[row].float(), module(row).float()
    place = raw.abs().argmax()
    return round(scale / float(own.flatten()[place] / raw.flatten()[place]), 6)


def _load(drafter: DSpineDraftModel, tensors: dict[str, torch.Tensor], folder: Path) -> tuple[list[str], list[str]]:
    """Copy the backbone; returns the names taken and dropped."""
    state = drafter.state_dict()
    taken, dropped, unknown = [], [], []
    for name, tensor in tensors.items():
        own = name.removeprefix("model.")
        if own in state and state[own].shape == tensor.shape:
            state[own].copy_(tensor)
            taken.append(own)
        elif OF_THE_METHOD.search(name) or OF_THE_TARGET.search(name):
            dropped.append(name)
        else:
            unknown.append(name)
    backbone = [n for n in state if not re.search(r"\.injection\.|^transfer\.|^fingerprint$|^mask_embedding$", n)]
    missing = [name for name in backbone if name not in taken]
    if unknown or missing:
        raise ValueError(
            f"expected the layout of z-lab's DFlash or DFlash2 or of DeepSpec's DSpark in '{folder}'; "
            f"missing: {', '.join(missing[:5]) or 'nothing'}; unknown: {', '.join(unknown[:5]) or 'nothing'}. "
            "Other layouts cannot be converted."
        )
    return taken, dropped


@torch.no_grad()
def _fit(drafter: DSpineDraftModel, target: Any) -> None:
    """Fit the transfer space to the target's output embedding and note whose drafter this is."""
    refuse_wrong_shapes(drafter.config, target)
    weight = target.get_output_embeddings().weight
    drafter.transfer.fit(weight)
    drafter.fingerprint.copy_(embedding_fingerprint(weight))
    if drafter.mask_embedding is not None:
        drafter.mask_embedding.copy_(target.get_input_embeddings().weight.float().mean(0))
