"""An oracle drafter: it knows a reference continuation and misses it at chosen positions, so drafts get accepted."""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_hf import DSpineDraftModel
from dspine_hf.transfer_dspine import TransitionCache

VOCABULARY = 61


@dataclass
class OracleBlock:
    """
    A draft block read off full rows `[slots, V]` and a bonus `[V, V]` for each predecessor; without it after tokens
    that are not `cached`, where that is not None: a set of tokens per slot but the last.
    """

    rows: torch.Tensor
    given: torch.Tensor
    candidates: torch.Tensor
    unary: torch.Tensor
    transitions: TransitionCache | None
    noise: torch.Tensor | None = None
    cached: list[set[int]] | None = None

    def row(self, slot, previous_ids):
        row = self.rows[slot - 1][None]
        return row if self.transitions is None or slot == 1 else row + self.given[previous_ids]


def oracle_block(
    rows: torch.Tensor, given: torch.Tensor, K: int, independent: bool = False, kept: int | None = None
) -> OracleBlock:
    """
    The block whose full-vocabulary logits are `rows`, plus `given[predecessor]` from slot 2 on.

    kept: cache so many predecessors alone, neither the best ones nor in their order.
    """
    unary, candidates = rows.topk(K, dim=-1)
    pairs = unary.new_zeros(rows.shape[0] - 1, K, K)
    for t in range(1, rows.shape[0]):
        pairs[t - 1] = unary[t] + given[candidates[t - 1]][:, candidates[t]]
    places, cached = None, None
    if kept is not None:
        chosen = torch.arange(1, K, 2)[:kept].flip(0)
        assert len(chosen) == kept
        pairs = torch.cat([pairs[:, chosen], unary[1:, None]], dim=1)
        places = torch.full((1, rows.shape[0] - 1, K), kept)
        places[..., chosen] = torch.arange(kept)
        cached = [set(ids[chosen].tolist()) for ids in candidates[:-1]]
    transitions = None if independent else TransitionCache(unary[None, 0], pairs[None], places)
    return OracleBlock(rows, given, candidates[None], unary[None], transitions, cached=cached)


class OracleDrafter(DSpineDraftModel):
    """
    Drafts `reference[position]` except where `position % miss_every == 0`; position 0 is the first real prompt token.

    Everything but the draft itself is the real drafter's: the context is extended, shapes are checked.
    """

    reference: list[int] = []
    miss_every: int = 4
    boost: float = 20.0
    context_lengths: list[int]

    @torch.no_grad()
    def draft_block(self, view, cache, anchor_ids, anchor_positions, num_slots=None, attention_mask=None, **more):
        super().draft_block(view, cache, anchor_ids, anchor_positions, num_slots)
        self.context_lengths = [*getattr(self, "context_lengths", []), cache.context_length]
        slots = self.config.num_draft_slots if num_slots is None else num_slots
        V = self.config.vocab_size
        generator = torch.Generator().manual_seed(int(anchor_positions))
        rows = torch.randn(slots, V, generator=generator)
        for slot in range(1, slots + 1):
            position = int(anchor_positions) + slot
            if position < len(self.reference):
                token = self.reference[position]
                if position % self.miss_every == 0:
                    token = (token + 1) % V
                rows[slot - 1, token] += self.boost
        given = torch.randn(V, V, generator=generator)
        return oracle_block(rows, given, self.config.num_candidates, self.config.selection == "independent")


def smallest_oracle(kind, target, miss_every: int, boost: float, **overrides):
    """A drafter of this oracle class for `target`, of the smallest shapes; its reference is still to be set."""
    values = {
        "num_hidden_layers": 2,
        "block_size": 6,
        "transfer_rank": 6,
        "num_candidates": 5,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    drafter = kind.for_target(target, **{**values, **overrides}).eval().requires_grad_(False)
    drafter.miss_every, drafter.boost = miss_every, boost
    return drafter


def oracle_for(target, reference=(), miss_every: int = 4, boost: float = 20.0, **overrides) -> OracleDrafter:
    """An oracle for `target`, of the smallest shapes."""
    drafter = smallest_oracle(OracleDrafter, target, miss_every, boost, **overrides)
    drafter.reference = [int(token) for token in reference]
    return drafter


def small_target(seed: int = 0, family=(LlamaConfig, LlamaForCausalLM), scale: float = 3.0, **overrides):
    """A random target of 4 layers whose text varies and hangs on the whole context: weights are drawn large."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config_class, model_class = family
    torch.manual_seed(seed)
    target = model_class(config_class(**{**values, **overrides})).eval().requires_grad_(False)
    with torch.no_grad():
        target.get_input_embeddings().weight.normal_(0, 1.0)
        target.get_output_embeddings().weight.normal_(0, scale / values["hidden_size"] ** 0.5)
    target.generation_config.eos_token_id = overrides.get("eos_token_id")
    return target


def prompt(length: int = 7, seed: int = 1, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """A random prompt `[1, length]` without the padding id 0."""
    return torch.randint(2, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy_pair(target, ids, miss_every: int = 4, drafter_options=None, **options):
    """Plain and drafted greedy results of the same call, and the oracle that drafted."""
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    horizon = {k: v for k, v in options.items() if k in ("attention_mask",)}
    reference = target.generate(ids, max_new_tokens=60, do_sample=False, **horizon)[0]
    if "attention_mask" in horizon:
        reference = reference[int((horizon["attention_mask"] == 0).sum()) :]
    drafter = oracle_for(target, reference, miss_every, **(drafter_options or {}))
    plain = target.generate(ids, **options)
    drafted = target.generate(ids, assistant_model=drafter, **options)
    return plain, drafted, drafter
