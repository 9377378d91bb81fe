"""The target inside the fast loop: its passes over a static cache, under masks and attention of the loop's own."""

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .compat_dspine import CACHE_NAMES, FeatureTaps, find_cache
from .fast_linear import few_rows
from .fast_tree import BITS, Tree
from .static_cache import Places, RaggedCache

ATTENTION = "dspine_verify"
_ACTIVE = threading.local()
_LOCK = threading.Lock()
_BORROWED: dict[int, list[Any]] = {}  # id(config) -> [config, its own attention, how many loops borrow it]


@dataclass
class Verification:
    """
    The pass that this thread's target runs.

    Attributes:
        attend: the fused attention, or None.
        start, limit: the first visible column of every batch row `[batch]`, and the last of every row `[batch, rows]`;
            of a tree, every row's place in the text.
        tree: what the rows of a tree see of each other, as [`Tree.bits`]; None: they are a chain.
        window: how many columns a row of a sliding layer sees; 0: there are no such layers.
        mixed: whether other layers see all columns.
        groups: query heads that share a key head.
        packed: by sliding or not, the mask for packed heads `[batch, 1, groups * rows, columns]`; None if attend.
    """

    attend: Any
    start: torch.Tensor
    limit: torch.Tensor
    tree: torch.Tensor | None
    window: int
    mixed: bool
    groups: int
    packed: dict[bool, torch.Tensor] | None


def _grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """
    Attention of a verification pass: query heads that share a key head are rows of one product, so that keys and
    values are never copied. Any other pass, and whatever this does not know, is transformers' own.
    """
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    extras = ("softcap", "position_bias", "s_aux")
    verification: Verification | None = getattr(_ACTIVE, "verification", None)
    if (
        verification is None
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or kwargs.get("dropout")
        or any(kwargs.get(name) is not None for name in extras)
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    known = "sliding_window" in kwargs or not verification.mixed
    sliding = bool(verification.window) and (not verification.mixed or bool(kwargs.get("sliding_window")))
    if verification.attend is not None and key.shape == value.shape and known:
        start, limit, tree = verification.start, verification.limit, verification.tree
        options = {"scale": kwargs.get("scaling"), "window": verification.window if sliding else 0, "tree": tree}
        out = verification.attend(query, key, value, start, limit, **options)
        return out.transpose(1, 2), None
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * rows, width)
        if verification.packed is not None and groups == verification.groups and known:
            attention_mask = verification.packed[sliding]
        elif rows > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )  # [batch, kv_heads, groups * rows, width]
    return out.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def borrowed_attention(target: Any) -> Iterator[None]:
    """
    Sends the attention of `target` through the loop's own function while the context lasts.

    Attention is chosen by the config, which other threads see too: for them the function is transformers' own. The
    last loop to leave gives the config back as it was.
    """
    config = target.config.get_text_config(decoder=True)
    if config._attn_implementation not in ("sdpa", ATTENTION):
        yield
        return
    with _LOCK:
        entry = _BORROWED.setdefault(id(config), [config, config._attn_implementation, 0])
        entry[2] += 1
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        with _LOCK:
            entry[2] -= 1
            if not entry[2]:
                config._attn_implementation = entry[1]
                del _BORROWED[id(config)]


def refuse_target(target: Any, layers: list[Any]) -> None:
    """
    Raises ValueError, naming the way out, for targets whose passes cannot run over a static cache.

    Args:
        target: the causal LM.
        layers: those of the cache that transformers made for it.
    """
    way_out = "Use model.generate(..., assistant_model=drafter), which takes it."
    name, text = type(target).__name__, target.config.get_text_config(decoder=True)
    attention = text._attn_implementation
    if attention not in ("sdpa", "eager", ATTENTION):
        raise ValueError(
            f"expected a target with attention 'sdpa' or 'eager'; found {attention!r}. Call "
            f"model.set_attn_implementation('sdpa'). {way_out}"
        )
    found = next((layer for layer in layers if not _keeps_rows(layer)), None)
    if found is not None or not layers:
        kind = "no cache of layers" if found is None else f"a {type(found).__name__}"
        raise ValueError(
            f"expected a target whose layers keep the keys and values of every token; {name} has {kind}. {way_out}"
        )
    if "position_ids" not in inspect.signature(target.forward).parameters or getattr(text, "alibi", False):
        raise ValueError(
            f"expected a target that takes position_ids; {name} reads positions off its mask, which a static cache "
            f"cannot give. {way_out}"
        )
    unknown = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"expected layers of full or sliding attention; {name} has {sorted(unknown)}. {way_out}")


_COMPILED: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_SHAPES = 64  # that a method may be compiled for, before torch goes on without


def compiled_method(model: Any, name: str, mode: bool | str = True) -> Any:
    """
    A method of a model through torch.compile, made once per model and mode.

    Args:
        mode: of torch.compile; True: its default one; "fused": that one with the kernel package's products of few
            rows.
    """
    found = _COMPILED.setdefault(model, {})
    if (name, mode) not in found:
        reference: Any = weakref.ref(model)  # or the value would keep its key alive
        call = lambda *args, **inputs: getattr(reference(), name)(*args, **inputs)  # noqa: E731
        call.__code__ = call.__code__.replace(co_name=name.strip("_"))  # torch counts compilations by code object
        how: dict[str, Any] = {} if mode is True else {"backend": few_rows} if mode == "fused" else {"mode": mode}
        compiled = torch.compile(call, dynamic=False, **how)

        def run(*args: Any, **inputs: Any) -> Any:
            with torch._dynamo.config.patch(cache_size_limit=_SHAPES):
                return compiled(*args, **inputs)

        found[name, mode] = run
    return found[name, mode]


def _keeps_rows(layer: Any) -> bool:
    kinds = {base.__name__ for base in type(layer).__mro__}
    if "DummyLayer" in kinds:  # attends to what another layer keeps, or not at all
        return True
    return "DynamicLayer" in kinds and not any("Quantized" in kind or "Linear" in kind for kind in kinds)


class TargetPasses:
    """
    Runs the target over prompts and drafts of a batch.

    Args:
        target: the causal LM.
        model_kwargs: what generate() prepared, the empty cache among it.
        capacity: columns of the static cache.

    Raises:
        ValueError: see [`refuse_target`].
    """

    def __init__(self, target: Any, model_kwargs: dict[str, Any], capacity: int):
        layers = getattr(find_cache(model_kwargs), "layers", None) or []
        refuse_target(target, layers)
        self.attach(target, None)
        self.cache = RaggedCache(len(layers), capacity)
        self._cache_name = next((name for name in CACHE_NAMES if name in model_kwargs), CACHE_NAMES[0])
        kept = [layer for layer in layers if hasattr(layer, "is_sliding")]
        windows = {getattr(layer, "sliding_window", None) if layer.is_sliding else None for layer in kept}
        self._window = next((w for w in windows if w is not None), None)
        self._mixed = len(windows) > 1
        text = target.config.get_text_config(decoder=True)
        heads = getattr(text, "num_attention_heads", 1)
        self._groups = max(1, heads // (getattr(text, "num_key_value_heads", None) or heads))
        self._keeps_logits = target._supports_logits_to_keep()
        self._additive = target.dtype if target.dtype.is_floating_point else torch.float32

    def attach(self, target: Any, taps: FeatureTaps | None, attend: Any = None, compiled: bool | str = False) -> None:
        """
        Puts in a call's models, or takes them out.

        Args:
            target: the causal LM, or None.
            taps: where the drafter's features are in its outputs; None without a drafter.
            attend: fused attention for verification, as `ops_dspine.verify_attention`; None: there is none.
            compiled: verify with the compiled target; a string: in this mode of torch.compile.
        """
        self.target, self.taps, self._attend = target, taps, attend
        self._compiled = compiled_method(target, "__call__", compiled) if compiled else target

    @property
    def fused(self) -> bool:
        """Whether verification attends with a fused kernel."""
        return self._attend is not None

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> Any:
        """The first pass over left-padded prompts `[batch, length]`; its logits are those of the last row."""
        batch, length = ids.shape
        columns = torch.arange(length, device=ids.device).expand(batch, -1)
        options = {"logits_to_keep": 1} if self._keeps_logits else {}
        return self._run(self.target, ids, mask, positions, Places(columns, length, 0), **options)

    def verify(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        start: torch.Tensor,
        padded: bool,
        places: Places,
        tree: Tree | None = None,
    ) -> Any:
        """
        A pass over `[anchor, drafts]`.

        Args:
            ids, positions: `[batch, rows]`.
            start: the first column of every batch row `[batch]`.
            padded: whether any of them is not 0.
            places: where the rows go.
            tree: what the drafts are where they are no chain; fused attention takes trees of up to 63 drafts.
        """
        hidden, window = start if padded else None, self._window
        attend = self._attend if tree is None or tree.tokens.shape[1] <= BITS else None
        masks = {} if window is None else {True: self._mask(places, hidden, window, tree)}
        if window is None or self._mixed:
            masks[False] = self._mask(places, hidden, None, tree)
        mask: Any = next(iter(masks.values()))
        if self._mixed:
            mask = {"full_attention": masks[False], "sliding_attention": masks[True]}
        packed = None
        if attend is None:
            packed = {kind: m if m.shape[2] == 1 else m.repeat(1, 1, self._groups, 1) for kind, m in masks.items()}
        limit, bits = places.index, None
        if tree is not None and attend is not None:
            limit, bits = limit[:, :1] + tree.depth, tree.bits
        _ACTIVE.verification = Verification(attend, start, limit, bits, window or 0, self._mixed, self._groups, packed)
        try:
            with borrowed_attention(self.target):
                return self._run(self._compiled, ids, mask, positions, places)
        finally:
            _ACTIVE.verification = None

    def features(self, outputs: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """What the drafter reads of a pass: `[batch, rows, taps * d]`."""
        assert self.taps is not None
        return torch.cat([tap.to(device=device, dtype=dtype) for tap in self.taps.read(outputs)], dim=-1)

    def _mask(self, places: Places, start: torch.Tensor | None, window: int | None, tree: Tree | None) -> torch.Tensor:
        """Additive mask `[batch, 1, rows, columns]`: a row sees its own columns up to itself, or up to the anchor and
        its ancestors in a tree."""
        rows = places.index.unsqueeze(-1)  # [batch, rows, 1]
        columns = torch.arange(places.columns, device=rows.device)
        if tree is not None:  # a row's place in the text
            rows = rows[:, :1] + tree.depth.unsqueeze(-1)
        hidden = columns > rows
        if start is not None:
            hidden = hidden | (columns < start[:, None, None])
        if window is not None:
            hidden = hidden | (columns <= rows - window)
        if tree is not None:
            seen = tree.sees
            if window is not None:
                seen = seen & (tree.depth.unsqueeze(1) > tree.depth.unsqueeze(2) - window)
            hidden = hidden | (columns > places.index[:, :1, None])
            hidden = hidden.scatter(2, places.index.unsqueeze(1).expand_as(seen), ~seen)
        mask = torch.zeros(hidden.shape, dtype=self._additive, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(self._additive).min).unsqueeze(1)

    def _run(
        self, run: Any, ids: torch.Tensor, mask: Any, positions: torch.Tensor, places: Places, **options: Any
    ) -> Any:
        self.cache.places = places
        if self.taps is not None:
            options["output_hidden_states"] = self.taps.request
        return run(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{self._cache_name: self.cache},
            **options,
        )
