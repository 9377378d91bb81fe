"""The cases of examples/draft_times.py: every kind of drafter, and what it runs to draft one block.

python examples/draft_times.py --out drafts.json
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import decode_cases
import torch
import torch.nn.functional as F
from kernel_cases import Borrowed, Shape
from transformers import Qwen3Config

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.baselines import DFlash2Drafter, DSparkDrafter
from dspine_hf.block_dspine import DraftBlock
from dspine_hf.configuration_dspine import spread_layer_ids
from dspine_hf.eagle import EagleDrafter
from dspine_hf.fast_walk import walk_batch
from dspine_hf.layers_dspine import Limits
from dspine_hf.loading import load_target
from dspine_hf.ops_dspine import EAGER
from dspine_hf.static_cache import Places, RaggedDraftCache
from dspine_hf.transfer_dspine import TransitionCache

SHAPES = {**decode_cases.SHAPES, "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152)}
LAYERS = 5
FLASH = {"injection": "none", "selection": "independent"}
M4 = {"injection_placement": "mlp", "rewrite_layers": 4}


@dataclass
class Scene:
    """What is drafted for: the ends of a target, its text config, and a text: `context` tokens, then the anchor."""

    target: Any
    config: Any
    context: int
    block: int
    candidates: int
    device: str
    dtype: torch.dtype
    ids: list[int] = field(init=False)
    features: torch.Tensor = field(init=False)  # [1, context + 1, len(ids) * d]
    tokens: torch.Tensor = field(init=False)  # [1, context + 1]

    def __post_init__(self) -> None:
        self.ids = spread_layer_ids(self.config.num_hidden_layers, LAYERS)
        like = {"device": self.device, "dtype": self.dtype}
        self.features = torch.randn(1, self.context + 1, len(self.ids) * self.config.hidden_size, **like)
        self.tokens = torch.randint(self.config.vocab_size, (1, self.context + 1), device=self.device)


def set_scene(target: str | None, shapes: str, context: int, block: int, candidates: int) -> Scene:
    """The ends of a target, loaded from a folder or .gguf file or with random weights, on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    if target:
        model, _ = load_target(target, dtype=dtype)
        config, ends = model.config.get_text_config(decoder=True), Borrowed(Shape(d=1, V=1), dtype)
        ends.embedding, ends.head = model.get_input_embeddings(), model.get_output_embeddings()
    else:
        *widths, head_dim, vocabulary = SHAPES[shapes]
        values = dict(zip(decode_cases.FIELDS, widths, strict=True))
        config = Qwen3Config(**values, head_dim=head_dim, vocab_size=vocabulary)
        with torch.device(device):
            ends = Borrowed(Shape(d=config.hidden_size, V=vocabulary), dtype)
    return Scene(ends.to(device).requires_grad_(False), config, context, block, candidates, device, dtype)


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: class, config, what makes a call that drafts, steps for n tokens, and if it can be fused."""

    model: type[DSpineDraftModel]
    config: dict[str, Any]
    draft: Callable[[Any, Scene], Callable[[], torch.Tensor]]
    steps: Callable[[int], int]
    fused: bool = False


def build(kind: Kind, scene: Scene) -> Any:
    """A drafter of a kind with random weights, none of them zeros."""
    config = {"num_hidden_layers": LAYERS, "target_layer_ids": scene.ids, "block_size": scene.block}
    config |= {"num_candidates": scene.candidates, **kind.config}
    with torch.device(scene.device):
        drafter = kind.model(DSpineConfig.for_target(scene.config, **config)).requires_grad_(False).eval()
        for name, weight in drafter.named_parameters():
            if name.endswith((".U.weight", "pair.B")):
                weight.normal_(std=0.02)
        drafter.transfer.W.normal_(std=drafter.config.hidden_size**-0.5)
    return drafter.to(scene.dtype)


def backdrop(drafter: Any, scene: Scene) -> tuple[Any, RaggedDraftCache, dict[str, Any]]:
    """The view of the target, the context's keys and values with room for a block, and what fused attention sees."""
    columns = scene.context + scene.block
    at = torch.arange(columns, device=scene.device)[None]
    cache = RaggedDraftCache(drafter.config.num_hidden_layers, columns)  # as in the fast loop
    cache.places = Places(at[:, : scene.context], scene.context, 0)
    drafter.extend_context(cache, scene.features[:, : scene.context], at[:, : scene.context])
    cache.places = Places(at[:, scene.context :], columns)
    limits = {}
    if drafter.ops is not EAGER:
        limits["limits"] = Limits(drafter.ops.verify_attention, at[:, 0], at[:, -1])
    return drafter.bind_target(scene.target).tabulated(), cache, limits


def draft_block(drafter: Any, scene: Scene) -> Callable[[], torch.Tensor]:
    """DFlash and DSpine: the block, and the walk through it."""
    view, cache, limits = backdrop(drafter, scene)
    anchor, position = scene.tokens[:, -1], torch.tensor([scene.context], device=scene.device)

    def draft() -> torch.Tensor:
        block = drafter.draft_block(view, cache, anchor, position, **limits)
        return walk_batch(block, [], None, False, drafter.ops).tokens

    return draft


def states(drafter: Any, scene: Scene) -> tuple[Any, Callable[[], torch.Tensor]]:
    """The view, and a call that gives the normed states [1, slots, d] of a backbone that is DFlash's."""
    view, cache, _ = backdrop(drafter, scene)
    anchor = scene.tokens[:, -1:]
    positions = scene.context + torch.arange(scene.block, device=scene.device)[None, None]

    def run() -> torch.Tensor:
        embeds = drafter.block_embeds(view, anchor, scene.block - 1)
        return drafter.norm(drafter(embeds, view.phi(anchor), positions, cache).hidden[:, 0, 1:])

    return view, run


def draft_dspark(drafter: Any, scene: Scene) -> Callable[[], torch.Tensor]:
    """DSpark-style: all rows of the head, then token by token the gains of the whole vocabulary."""
    (view, run), pair = states(drafter, scene), drafter.pair

    def draft() -> torch.Tensor:
        hidden, chosen = run(), [scene.tokens[:, -1]]
        logits = view.logits(hidden)
        for slot in range(scene.block - 1):
            gains = F.linear(pair.code(hidden[:, slot], chosen[-1]), pair.B)
            chosen.append((logits[:, slot] + gains).argmax(-1))
        return torch.stack(chosen[1:], dim=1)

    return draft


def draft_dflash2(drafter: Any, scene: Scene) -> Callable[[], torch.Tensor]:
    """DFlash2-style: candidates, the scores of their pairs, and the walk."""
    (view, run), pair, anchor = states(drafter, scene), drafter.pair, scene.tokens[:, -1:]

    def draft() -> torch.Tensor:
        hidden = run()
        unary, ids = view.best(hidden, scene.candidates, EAGER.topk)
        first = unary[:, 0] + pair(hidden[:, 0], anchor, ids[:, 0]).squeeze(1)
        pairs = unary[:, 1:, None] + pair(hidden[:, 1:], ids[:, :-1], ids[:, 1:])
        block = DraftBlock(ids, unary, TransitionCache(first, pairs), drafter, view, None)
        return walk_batch(block, [], None, False).tokens

    return draft


def draft_eagle(drafter: Any, scene: Scene) -> Callable[[], torch.Tensor]:
    """EAGLE-3-style: layer, head and best token of one row after another, their keys and values put behind others'."""
    view, layer, n = drafter.bind_target(scene.target), drafter.layers[0], scene.context
    attention = layer.self_attn
    fused = drafter.hidden_norm(drafter.fc(scene.features[:, :n]))
    shifted = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], dim=1)  # row i: the feature of i - 1
    at = torch.arange(n + scene.block - 1, device=scene.device)[None]
    context = layer.joined(view.embed(scene.tokens[:, :n]), shifted)
    rows = attention.keys_values(context, *drafter.rotary_emb(context, at[:, :n]))
    keys, values = (F.pad(t, (0, 0, 0, scene.block - 1)) for t in rows)  # [1, kv_heads, n + slots, head_dim]

    def draft() -> torch.Tensor:
        state, chosen = fused[:, -1:], [scene.tokens[:, -1:]]
        turns = drafter.rotary_emb(state, at[:, n:])
        for step in range(scene.block - 1):
            x = layer.joined(view.embed(chosen[-1]), state)
            cos, sin = (t[:, step : step + 1] for t in turns)
            end = n + step + 1
            keys[:, :, end - 1 : end], values[:, :, end - 1 : end] = attention.keys_values(x, cos, sin)
            seen = keys[:, :, :end], values[:, :, :end]
            state = layer.feed_forward(state + attention(attention.queries(x, cos, sin), *seen, None))
            _, best = view.best(drafter.norm(state), 1, lambda scores, _: scores.max(-1, keepdim=True))
            chosen.append(best[..., 0])
        return torch.cat(chosen[1:], dim=1)

    return draft


KINDS = {
    "dflash": Kind(DSpineDraftModel, {**FLASH, "num_candidates": 1}, draft_block, lambda n: 1, True),
    "dspine-m0": Kind(DSpineDraftModel, {**M4, "rewrite_layers": 0}, draft_block, lambda n: 2, True),
    "dspine-m4": Kind(DSpineDraftModel, M4, draft_block, lambda n: 2, True),
    "dspine-m4-chain1": Kind(DSpineDraftModel, {**M4, "chain_passes": 1}, draft_block, lambda n: 3, True),
    "dspark": Kind(DSparkDrafter, FLASH, draft_dspark, lambda n: 1 + n),
    "dflash2": Kind(DFlash2Drafter, FLASH, draft_dflash2, lambda n: 2),
    "eagle3": Kind(EagleDrafter, {**FLASH, "num_hidden_layers": 1}, draft_eagle, lambda n: n),
}
