"""DSpineConfig: every field of a DSpine drafter, and how its shapes follow from the target's config."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

INJECTIONS = ("all", "last", "none")
SELECTIONS = ("transition", "independent")
PLACEMENTS = ("layer", "mlp")


def spread_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The target layers whose outputs feed the drafter, as in DFlash: evenly spread, 5 of 36 are 1, 9, 17, 25 and 33.

    Layer ids count from 0 and mean "the hidden state after that decoder layer". The last layer is never among them.

    Raises:
        ValueError: the target has too few layers to read distinct features from.
    """
    n, count = num_target_layers, num_draft_layers
    if n < 2:
        raise ValueError(f"a DSpine drafter reads a target with at least 2 decoder layers; this one has {n}.")
    if count == 1:
        return [n // 2 if n > 2 else 0]
    if n < max(2 * count, 5):
        ids = [round(i * (n - 2) / (count - 1)) for i in range(count)]
    else:
        ids = [round(1 + i * (n - 4) / (count - 1)) for i in range(count)]
    return sorted(set(ids))


class DSpineConfig(PreTrainedConfig):
    r"""
    The configuration of a [`DSpineDraftModel`]. Build one for a target with [`DSpineConfig.for_target`].

    Args:
        hidden_size: width d of the drafter; equal to the target's.
        vocab_size: number of rows V of the target's output embedding (padding rows included).
        num_hidden_layers: number L of drafter layers.
        num_attention_heads, num_key_value_heads, head_dim: grouped-query attention of every layer.
        intermediate_size: width of the SwiGLU layers.
        rms_norm_eps: epsilon of every RMSNorm and of the weightless `rms` of the transfer space.
        rope_parameters: rotary theta and scaling, as in Transformers; always over the full head.
        block_size: B, slots per block: slot 0 is the anchor, slots 1..B-1 are drafted.
        target_layer_ids: target layers whose outputs are concatenated into a context row of width len(ids) * d.
        num_target_layers: how many decoder layers the target has.
        mask_token_id: the token whose input embedding fills the undecided slots; None: a learned vector.
        transfer_rank: r, the width of the transfer space, at most d.
        num_candidates: K, candidates kept per slot for the transition cache.
        num_sampled_candidates: S, candidates that a slot is sampled from; K of them, the likeliest to be drawn, are
            predecessors in the transition cache. At most the whole vocabulary; None, or less than K: K.
        injection: "all" layers, the "last" one, or "none".
        injection_placement: "layer": the write follows the whole layer; "mlp": it stands between attention and MLP.
        rewrite_layers: how many layers before the last one take the decided predecessor too. 0: only the last write is
            done again; m: the write of layer L-m is done again and the m layers after it run on every candidate pair.
        chain_passes: how many times a likely chain is run through the rewritten layers before candidate pairs are,
            which then attend to its states too: a slot knows its whole prefix. 0: its predecessor alone.
        selection: "transition": the draft is a chain through the transition cache; "independent": each slot alone.
        context_window: the drafter attends to at most this many of the latest context rows; None: to all.
        logit_scale, logit_softcap: applied to the drafter's scores as the target applies them to its own logits.
        embedding_scale: factor that the target applies to its input embeddings outside of the embedding module.
        use_fused_kernels: draft with Triton kernels where they can run (gradients off, r up to 512, K up to 32, a GPU
            that triton has a backend for); elsewhere the eager operations run, with one warning that says why.

    ("none", "independent") is DFlash: its checkpoints load into it.
    """

    model_type = "dspine"
    _auto_class: ClassVar[str | None] = "AutoConfig"  # saved with its code
    keys_to_ignore_at_inference = ["past_key_values"]

    hidden_size: int = 4096
    vocab_size: int = 151936
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_parameters: dict | None = None
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    block_size: int = 16
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 36
    mask_token_id: int | None = None
    transfer_rank: int = 256
    num_candidates: int = 16
    num_sampled_candidates: int | None = 256
    injection: str = "all"
    injection_placement: str = "layer"
    rewrite_layers: int = 0
    chain_passes: int = 0
    selection: str = "transition"
    context_window: int | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    use_fused_kernels: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        if self.target_layer_ids is None:
            self.target_layer_ids = spread_layer_ids(self.num_target_layers, self.num_hidden_layers)
        super().__post_init__(**kwargs)
        self._validate_shapes()
        self._validate_method()

    def _validate_shapes(self) -> None:
        """Refuse shapes that cannot work together. Raises ValueError with the cure."""
        positive = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        for name in (*positive, "head_dim", "intermediate_size", "transfer_rank", "num_candidates"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, not {getattr(self, name)!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: set one to a multiple of the other."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even head_dim.")
        if self.transfer_rank > self.hidden_size:
            raise ValueError(
                f"transfer_rank={self.transfer_rank} exceeds hidden_size={self.hidden_size}: "
                f"set transfer_rank to at most {self.hidden_size}."
            )
        sampled = self.num_sampled_candidates
        if sampled is not None and (not isinstance(sampled, int) or sampled < 1):
            raise ValueError(f"num_sampled_candidates must be a positive integer, or None for K; not {sampled!r}.")
        if self.num_candidates > self.vocab_size:
            raise ValueError(
                f"num_candidates={self.num_candidates} exceeds vocab_size={self.vocab_size}: "
                f"set num_candidates to at most {self.vocab_size}."
            )
        ids = self.target_layer_ids
        if not ids or any(not 0 <= i < self.num_target_layers - 1 for i in ids) or len(set(ids)) != len(ids):
            raise ValueError(
                f"target_layer_ids={ids} must be distinct and lie in 0..{self.num_target_layers - 2} for a target of "
                f"{self.num_target_layers} layers (the last layer's output is stored normed). "
                "Leave it out for the default."
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size}: "
                "set it to None to learn the mask embedding."
            )

    def _validate_method(self) -> None:
        """Refuse contradictory method switches. Raises ValueError with the cure."""
        for name, allowed in (
            ("injection", INJECTIONS),
            ("selection", SELECTIONS),
            ("injection_placement", PLACEMENTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(allowed)}.")
        if (self.injection, self.selection) == ("none", "transition"):
            raise ValueError(
                'injection="none" has no write that could condition on a predecessor: use selection="independent" '
                '(DFlash), or injection="last" or "all".'
            )
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ValueError(f"block_size={self.block_size!r} leaves no slot to draft: use 2 or more.")
        if not 0 <= self.rewrite_layers < self.num_hidden_layers:
            raise ValueError(
                f"rewrite_layers={self.rewrite_layers} must lie in 0..{self.num_hidden_layers - 1} "
                f"for num_hidden_layers={self.num_hidden_layers}."
            )
        if self.rewrite_layers and self.injection != "all":
            raise ValueError(
                f'rewrite_layers={self.rewrite_layers} needs injection="all"; this config has "{self.injection}".'
            )
        if not isinstance(self.chain_passes, int) or self.chain_passes < 0:
            raise ValueError(f"chain_passes must be 0 or a positive integer, not {self.chain_passes!r}.")
        if self.chain_passes and not (self.rewrite_layers and self.selection == "transition"):
            raise ValueError(
                f'chain_passes={self.chain_passes} needs rewrite_layers of at least 1 and selection="transition"; '
                f'this config has {self.rewrite_layers} and "{self.selection}".'
            )
        if self.context_window is not None and self.context_window < 1:
            raise ValueError(
                f"context_window={self.context_window} must be at least 1, or None for the whole context."
            )
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise ValueError(f"logit_softcap={self.logit_softcap} must be positive, or None.")

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The content of config.json; OSError where there is none, which Transformers would take for the defaults."""
        found, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "model_type" not in found:
            raise OSError(
                f"expected a drafter's config.json at '{pretrained_model_name_or_path}'; found none, or one without "
                "model_type. Check the path; if a save was broken off there, save the drafter again."
            )
        return found, rest

    @property
    def num_draft_slots(self) -> int:
        """Slots that are drafted in one pass: B - 1."""
        return self.block_size - 1

    @property
    def sampling_width(self) -> int:
        """How many candidates a slot is sampled from: `num_sampled_candidates`, at least K, at most V."""
        return min(max(self.num_candidates, self.num_sampled_candidates or 0), self.vocab_size)

    def injects(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` has an injection."""
        return self.injection == "all" or (self.injection == "last" and layer_idx == self.num_hidden_layers - 1)

    @classmethod
    def field_types(cls) -> dict[str, Any]:
        """The fields that this config has beside those of every config, and their types."""
        return {name: kind for name, kind in cls.__annotations__.items() if not name.startswith("_")}

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "DSpineConfig":
        """Derive every shape from a decoder-only target's config.

        Args:
            target_config: config of the target; of a multimodal target the text part is taken.
            overrides: any field of [`DSpineConfig`].

        Raises:
            ValueError: the target is an encoder-decoder, or the result is inconsistent.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"{target_config.model_type} is an encoder-decoder; DSpine drafts for decoder-only targets."
            )
        text = target_config.get_text_config(decoder=True)
        d, heads = text.hidden_size, text.num_attention_heads
        values: dict[str, Any] = {
            "hidden_size": d,
            "vocab_size": text.vocab_size,
            "num_target_layers": text.num_hidden_layers,
            "transfer_rank": min(128 if d < 2048 else 256, d),
            "num_candidates": min(16, text.vocab_size),
            "intermediate_size": _first_of(text, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * d,
            "rms_norm_eps": _first_of(text, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
            or 1e-6,
            "max_position_embeddings": _first_of(text, "max_position_embeddings") or 4096,
            "logit_scale": _logit_scale(text),
            "logit_softcap": getattr(text, "final_logit_softcapping", None),
            "embedding_scale": float(getattr(text, "embedding_multiplier", None) or 1.0),
            # A pipeline asks for the drafter's tokenizer when these differ.
            **{name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
            **_head_shapes(text, d, heads),
        }
        values.update(overrides)
        values.setdefault("rope_parameters", _rope_parameters(text, values["head_dim"]))
        return cls(**values)


def _value(config: PreTrainedConfig, name: str) -> Any:
    """A field of the target's config; where its layers differ (Gemma 3n, Gemma 4), the first layer's."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # Transformers refuses to name one value for all layers
        value = getattr(config.per_layer_config[0], name, None)
    return value[0] if isinstance(value, (list, tuple)) else value


def _first_of(config: PreTrainedConfig, *names: str) -> Any:
    return next((value for name in names if (value := _value(config, name)) is not None), None)


def _head_shapes(text: PreTrainedConfig, d: int, heads: int) -> dict[str, int]:
    """Attention shapes of the drafter; families with latent or multi-query attention get plain grouped queries."""
    latent = getattr(text, "kv_lora_rank", None) is not None
    kv = 1 if getattr(text, "multi_query", False) else _first_of(text, "num_key_value_heads", "num_kv_heads") or heads
    head_dim = None if latent else _value(text, "head_dim")
    head_dim = head_dim or max(2, d // heads // 2 * 2)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv if heads % kv == 0 else heads,
        "head_dim": head_dim,
    }


def _logit_scale(text: PreTrainedConfig) -> float:
    """The factor on the target's logits: Granite divides by `logits_scaling`; Cohere and Falcon-H1 multiply."""
    if (scaling := getattr(text, "logits_scaling", None)) is not None:
        return float(scaling if text.model_type == "hyperclovax" else 1.0 / scaling)
    scale = _first_of(text, "logit_scale", "lm_head_multiplier")
    return float(scale) if isinstance(scale, (int, float)) else 1.0


def _rope_parameters(text: PreTrainedConfig, head_dim: int) -> dict[str, Any]:
    """Theta and scaling of the target's full-attention layers, over the full head."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "rope_theta" not in rope and "full_attention" in rope:
        rope = dict(rope["full_attention"] or {})
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    rope = {k: v for k, v in rope.items() if k not in ("partial_rotary_factor", "mrope_section", "mrope_interleaved")}
    factors = rope.get("short_factor") or rope.get("long_factor")
    known = rope.get("rope_type", "default") in ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
    if not known or (factors is not None and len(factors) != head_dim // 2):
        rope = {}
    return {"rope_type": "default", **rope, "rope_theta": float(theta)}
