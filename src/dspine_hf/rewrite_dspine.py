"""The last writes done again with decided predecessors, and the states of a whole chain.

The rewritten layers run once more for a slot whose predecessor is decided. With `chain_passes` they also attend to the
states that a drafted chain has in these layers, each slot to those of the slots before it: so a slot knows its whole
prefix, not its predecessor alone, and all slots still run at once.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .layers_dspine import Limits, normed
from .transfer_dspine import predecessor_keys


@dataclass
class RewriteState:
    """The states before the write that is done again, and the keys and values that later layers attend to.

    before: [batch, blocks, B-1, d], slots 1..B-1. keys_values: one (K, V) per layer after the rewritten one.
    rotary: cos and sin of slots 1..B-1, [batch, blocks, B-1, head_dim]. mask: [batch, blocks, B-1, keys] or None.
    limits: instead of a mask, or None.
    """

    before: torch.Tensor
    keys_values: list[tuple[torch.Tensor, torch.Tensor]]
    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    limits: Limits | None = None


@dataclass
class ChainStates:
    """One chain per block in the rewritten layers.

    hidden: [batch, blocks, slots, d], before the final norm: slots 1.., each given the chain's tokens before it.
    keys_values: one (K, V) per layer after the first rewritten one, [batch, kv_heads, blocks * slots, head_dim].
    """

    hidden: torch.Tensor
    keys_values: list[tuple[torch.Tensor, torch.Tensor]]


def rewritten(
    drafter: Any, state: RewriteState, messages: torch.Tensor, first_slot: int, chain: ChainStates | None = None
) -> torch.Tensor:
    """The states of `DSpineDraftModel.rewrite`, before the final norm; arguments as there."""
    return _run(drafter, state, messages, first_slot, None if chain is None else chain.keys_values)[0]


def chain_states(drafter: Any, state: RewriteState, messages: torch.Tensor) -> ChainStates:
    """The chain whose tokens before slots 1.. have the features `messages` [batch, blocks, slots, r], all at once."""
    hidden, keys_values = _run(drafter, state, messages.unsqueeze(3), 1, None, own=True)
    return ChainStates(hidden.squeeze(3), keys_values)


def told_states(drafter: Any, state: RewriteState, messages: torch.Tensor) -> torch.Tensor:
    """Normed states [batch, blocks, slots, d] of slots 1.. that know the true token before them; with `chain_passes`
    all true tokens before them. messages: those tokens' features [batch, blocks, slots, r]."""
    if drafter.config.chain_passes:
        return drafter.norm(chain_states(drafter, state, messages).hidden)
    return drafter.rewrite(state, messages.unsqueeze(3)).squeeze(3)


def _run(
    drafter: Any,
    state: RewriteState,
    messages: torch.Tensor,
    first_slot: int,
    chain: list[tuple[torch.Tensor, torch.Tensor]] | None,
    own: bool = False,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The rewritten layers for n messages a slot; own: attend to these rows' own keys and values, and return them."""
    shape = (batch, blocks, slots, n) = messages.shape[:4]
    pick = slice(first_slot - 1, first_slot - 1 + slots)
    first = drafter.config.num_hidden_layers - 1 - drafter.config.rewrite_layers
    ops = drafter.ops
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    h = drafter.layers[first].write(state.before[:, :, pick].unsqueeze(3), messages, ops)
    if not state.keys_values:
        return h, found
    cos, sin = (t[:, :, pick].unsqueeze(3).expand(*shape, -1).flatten(1, 3) for t in state.rotary)
    mask, limits = state.mask, state.limits
    if mask is not None:
        mask = mask[:, :, pick].unsqueeze(3).expand(*shape, -1).flatten(1, 3).unsqueeze(1)
    if own or chain:
        columns = state.keys_values[0][0].shape[2]
        length = slots if chain is None else chain[0][0].shape[2] // blocks
        mask = _with_chain(mask, limits, columns, shape, first_slot, length, h.device)
        limits = None
    more = found if own else chain
    for i, (layer, (k, v)) in enumerate(zip(drafter.layers[first + 1 :], state.keys_values, strict=True)):
        x = normed(layer.input_layernorm, h, ops).flatten(1, 3)
        if own:
            found.append(layer.self_attn.keys_values(x, cos, sin, ops))
        if more:
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), more[i], strict=True))
        q = layer.self_attn.queries(x, cos, sin, ops)
        h = h + layer.self_attn(q, k, v, mask, limits).view_as(h)
        h = layer.write(h if layer.inner_write else layer.feed_forward(h, ops), messages, ops)
    return h, found


def _with_chain(
    mask: torch.Tensor | None,
    limits: Limits | None,
    columns: int,
    shape: tuple[int, int, int, int],
    first_slot: int,
    length: int,
    device: torch.device,
) -> torch.Tensor:
    """A mask over `columns` keys and chains of `length` slots: [batch, 1, rows, columns + blocks * length]."""
    batch, blocks, slots, n = shape
    rows = blocks * slots * n
    if mask is None:
        mask = torch.ones(batch, 1, 1, columns, dtype=torch.bool, device=device)
        if limits is not None:
            at = torch.arange(columns, device=device)
            mask = ((at >= limits.first[:, None]) & (at <= limits.last[:, None]))[:, None, None]
        mask = mask.expand(-1, -1, rows, -1)
    before = (
        torch.arange(length, device=device)
        < torch.arange(first_slot - 1, first_slot - 1 + slots, device=device)[:, None]
    )
    own = torch.eye(blocks, dtype=torch.bool, device=device)
    seen = (own[:, None, None, :, None] & before[None, :, None, None, :]).expand(-1, -1, n, -1, -1)
    seen = seen.reshape(1, 1, rows, blocks * length).expand(batch, -1, -1, -1)
    return torch.cat([mask, seen], dim=-1)


@dataclass
class Proposal:
    """A drafted chain and the candidates that follow from it.

    candidates, unary: [batch, blocks, slots, n], the best tokens given the chain, best first, and their logits fp32.
    """

    chain: ChainStates
    candidates: torch.Tensor
    unary: torch.Tensor


def drafted_chain(
    drafter: Any,
    view: Any,
    state: RewriteState,
    anchor_features: torch.Tensor,
    candidates: torch.Tensor,
    unary: torch.Tensor,
    noise: torch.Tensor | None = None,
    temperature: Any = 1.0,
) -> Proposal:
    """A likely chain, decided in `chain_passes` steps, each of all slots at once; after each of them every slot's
    candidates are those of its state given the chain.

    The first step takes every slot's choice by its unary logits, each later one the choices given the chain before.
    With the walk's noise they are the tokens that it would draw: a slot's scores depend on the noise of earlier slots
    alone, so that the token drawn there has the law q of these scores, and a walk stays exact.

    Args:
        anchor_features: phi(anchor) [batch, blocks, r].
        candidates, unary: [batch, blocks, slots, n].
        noise: exponential variables of every token [batch, blocks, slots, V]; None: greedy.
    """
    first, scores, chain = (candidates[:, :, :1], unary[:, :, :1]), unary, None
    for _ in range(drafter.config.chain_passes):
        keys = scores if noise is None else predecessor_keys(scores, noise.gather(3, candidates), temperature)
        tokens = candidates.gather(3, keys.argmax(-1, keepdim=True)).squeeze(3)
        messages = torch.cat([anchor_features.unsqueeze(2), view.phi(tokens[:, :, :-1])], dim=2)
        chain = chain_states(drafter, state, messages)
        count = candidates.shape[-1]
        states = normed(drafter.norm, chain.hidden[:, :, 1:], drafter.ops)
        found = view.best(states, count, drafter.ops.at(count).topk)
        scores, candidates = (torch.cat(pair, dim=2) for pair in zip((first[1], first[0]), found, strict=True))
    assert chain is not None, "only drafters with chain_passes draft a chain"
    return Proposal(chain, candidates, scores)
