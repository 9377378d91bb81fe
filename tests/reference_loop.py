"""One draft of DSpine written out in plain loops, one slot and one head at a time: the yardstick for the model.

Nothing here comes from the package. A draft is a function of the drafter's state dict, a few plain numbers, the
target's embedding and head, the context rows with their positions, and the anchor with its position:

    z_t   = rms(P n(h_t))                                      for every slot t = 0..B-1
    s_1   = phi(anchor),  s_t = z_{t-1} for t > 1              phi(v) = rms(W E[v] + c)
    h_t  += U ( sigmoid(A n(h_t) + B s_t + b) * s_t )          for t >= 1; slot 0 is never written

`without` names one term to leave out; a comparison that still passes then was not testing that term.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

TERMS = ("P", "A", "B", "b", "U", "shift", "anchor_phi", "slot_0_untouched")
DETAILS = (
    "injection_norm",
    "gate",
    "z_norm",
    "phi_norm",
    "phi_offset",
    "decided_predecessor",
    "bidirectional",
    "context",
)


@dataclass
class PlainConfig:
    """The numbers a draft depends on."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_candidates: int
    eps: float
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    injection: str = "all"
    placement: str = "layer"
    rewrite_layers: int = 0
    context_window: int | None = None
    mask_token_id: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass
class TargetWeights:
    """What the drafter borrows: input embedding [V, d], output embedding E [V, d], output bias [V] or None."""

    embedding: Tensor
    head: Tensor
    bias: Tensor | None = None


@dataclass
class PlainDraft:
    """Everything a draft computes, slot by slot. Slots of `unary`, `candidates` and `scores` are 1..B-1."""

    layer_outputs: list[list[Tensor]]  # [layer][slot] -> [d]
    z: list[list[Tensor] | None]  # [layer][slot] -> [r]
    hidden: Tensor  # [B, d] after the drafter's norm
    unary: Tensor  # [B-1, V]
    candidates: Tensor  # [B-1, K]
    scores: list[Tensor]  # slot 1: [1, V]; slot t: [K, V], one full row per candidate of slot t-1
    walk: list[int]  # the greedy choice of slots 1..B-1

    def pairs(self, slot: int) -> Tensor:
        """S_t[a, b] on the candidates of slot t: [K_prev, K], for slot 1 [1, K]."""
        return self.scores[slot - 1][:, self.candidates[slot - 1]]


class LoopDraft:
    """Runs one draft; `without` removes one term of `TERMS` or `DETAILS`."""

    def __init__(self, weights, config: PlainConfig, target: TargetWeights, without=None, dtype=torch.float64):
        if without is not None and without not in TERMS + DETAILS:
            raise ValueError(f"unknown term {without!r}; one of {TERMS + DETAILS}")
        self.w = {name: value.detach().to(dtype) for name, value in weights.items()}
        self.config, self.without, self.dtype = config, without, dtype
        self.embedding, self.head = target.embedding.detach().to(dtype), target.head.detach().to(dtype)
        self.bias = None if target.bias is None else target.bias.detach().to(dtype)
        self.frequencies = rope_frequencies(config.rope, config.head_dim).to(dtype)

    def __call__(self, features: Tensor, positions: list[int], anchor: int, anchor_position: int) -> PlainDraft:
        """features [C, taps * d] and their C absolute positions -> the draft of the anchor's block."""
        c = self.config
        seen = 0 if self.without == "context" else min(len(positions), c.context_window or len(positions))
        first_seen = len(positions) - seen
        context = [self.norm("hidden_norm", self.w["fc.weight"] @ row) for row in features[first_seen:].to(self.dtype)]
        places = [anchor_position + slot for slot in range(c.block_size)]
        h = [self.embed(anchor)] + [self.mask() for _ in range(1, c.block_size)]
        outputs, zs, before_write, memory = [], [], [], []
        for layer in range(c.num_layers):
            memory.append(self.keys_values(layer, context, list(positions)[first_seen:], h, places))
            h = [x + self.attend(layer, x, slot, places[slot], memory[layer]) for slot, x in enumerate(h)]
            if c.placement == "layer":
                h = [x + self.mlp(layer, x) for x in h]
            before_write.append(h)
            writes = c.injection == "all" or (c.injection == "last" and layer == c.num_layers - 1)
            zs.append(self.predicted(layer, h) if writes else None)
            if writes:
                h = self.write_all(layer, h, zs[layer], anchor)
            if c.placement == "mlp":
                h = [x + self.mlp(layer, x) for x in h]
            outputs.append(h)
        hidden = torch.stack([self.norm("norm", x) for x in h])
        unary = torch.stack([self.logits(x) for x in hidden[1:]])
        candidates = unary.topk(c.num_candidates, dim=-1).indices
        scores = []
        if c.injection != "none":
            scores = self.transitions(before_write, zs, memory, places, anchor, candidates)
        return PlainDraft(outputs, zs, hidden, unary, candidates, scores, greedy_walk(unary, candidates, scores))

    # --- the input block -----------------------------------------------------------------------------------------

    def embed(self, token: int) -> Tensor:
        return self.embedding[token] * self.config.embedding_scale

    def mask(self) -> Tensor:
        if self.config.mask_token_id is None:
            return self.w["mask_embedding"].reshape(-1)
        return self.embed(self.config.mask_token_id)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.rms(x) * self.w[f"{name}.weight"]

    def rms(self, x: Tensor) -> Tensor:
        mean_square = sum(value * value for value in x.unbind()) / x.numel()
        return x / torch.sqrt(mean_square + self.config.eps)

    # --- one backbone layer --------------------------------------------------------------------------------------

    def keys_values(self, layer, context, positions, h, places) -> tuple[list, list]:
        """Keys and values [row][kv_head] of the context rows, then of the block's slots."""
        prefix = f"layers.{layer}.self_attn"
        rows = context + [self.norm(f"layers.{layer}.input_layernorm", x) for x in h]
        keys = [
            self.heads(f"{prefix}.k_proj", f"{prefix}.k_norm", x, position)
            for x, position in zip(rows, positions + places, strict=True)
        ]
        return keys, [self.heads(f"{prefix}.v_proj", None, x, None) for x in rows]

    def attend(self, layer, x: Tensor, slot: int, place: int, memory) -> Tensor:
        """One slot looks at every context row and at the whole block."""
        c, prefix, (keys, values) = self.config, f"layers.{layer}.self_attn", memory
        normed = self.norm(f"layers.{layer}.input_layernorm", x)
        query = self.heads(f"{prefix}.q_proj", f"{prefix}.q_norm", normed, place)
        visible = len(keys) if self.without != "bidirectional" else len(keys) - c.block_size + slot + 1
        mixed = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            logits = [query[head] @ keys[j][group] / math.sqrt(c.head_dim) for j in range(visible)]
            share = torch.softmax(torch.stack(logits), dim=0)
            mixed.append(sum(share[j] * values[j][group] for j in range(visible)))
        return self.w[f"{prefix}.o_proj.weight"] @ torch.cat(mixed)

    def heads(self, projection: str, norm: str | None, x: Tensor, position: int | None) -> list[Tensor]:
        parts = (self.w[f"{projection}.weight"] @ x).split(self.config.head_dim)
        if norm is None:
            return list(parts)
        return [self.rotate(self.norm(norm, part), position) for part in parts]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Dimension i and i + head_dim / 2 turn together by position * frequency i."""
        half = x.numel() // 2
        out = x.clone()
        for i in range(half):
            angle = position * self.frequencies[i].item()
            cos, sin = math.cos(angle), math.sin(angle)
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"layers.{layer}.mlp"
        x = self.norm(f"layers.{layer}.post_attention_layernorm", x)
        gate, up = self.w[f"{prefix}.gate_proj.weight"] @ x, self.w[f"{prefix}.up_proj.weight"] @ x
        return self.w[f"{prefix}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    # --- transfer space and injection ----------------------------------------------------------------------------

    def phi(self, token: int) -> Tensor:
        feature = self.w["transfer.W"] @ self.head[token]
        if self.without != "phi_offset":
            feature = feature + self.w["transfer.c"]
        return feature if self.without == "phi_norm" else self.rms(feature)

    def predicted(self, layer: int, h: list[Tensor]) -> list[Tensor]:
        P = self.w[f"layers.{layer}.injection.P.weight"]
        features = [P @ self.inner_norm(layer, x) for x in h]
        if self.without == "P":
            features = [torch.zeros_like(x) for x in features]
        return features if self.without == "z_norm" else [self.rms(x) for x in features]

    def inner_norm(self, layer: int, x: Tensor) -> Tensor:
        return x if self.without == "injection_norm" else self.norm(f"layers.{layer}.injection.norm", x)

    def received(self, z: list[Tensor], anchor: int) -> list[Tensor]:
        """What slot t receives, for t = 0..B-1 (slot 0's entry matters only when it is written by mistake)."""
        if self.without == "shift":
            return [z[0], self.phi(anchor)] + [z[slot] for slot in range(2, len(z))]
        first = z[0] if self.without == "anchor_phi" else self.phi(anchor)
        return [z[-1], first] + [z[slot - 1] for slot in range(2, len(z))]

    def write_all(self, layer: int, h: list[Tensor], z: list[Tensor], anchor: int) -> list[Tensor]:
        s = self.received(z, anchor)
        first_written = 0 if self.without == "slot_0_untouched" else 1
        return [x if t < first_written else self.write(layer, x, s[t]) for t, x in enumerate(h)]

    def write(self, layer: int, x: Tensor, s: Tensor) -> Tensor:
        prefix = f"layers.{layer}.injection"
        gate = torch.zeros_like(s)
        if self.without != "A":
            gate = gate + self.w[f"{prefix}.A.weight"] @ self.inner_norm(layer, x)
        if self.without != "B":
            gate = gate + self.w[f"{prefix}.B.weight"] @ s
        if self.without != "b":
            gate = gate + self.w[f"{prefix}.B.bias"]
        message = s if self.without == "gate" else torch.sigmoid(gate) * s
        return x if self.without == "U" else x + self.w[f"{prefix}.U.weight"] @ message

    # --- scores --------------------------------------------------------------------------------------------------

    def logits(self, normed: Tensor) -> Tensor:
        c = self.config
        out = self.head @ normed
        if self.bias is not None:
            out = out + self.bias
        out = out * c.logit_scale
        if c.logit_softcap is not None:
            out = c.logit_softcap * torch.tanh(out / c.logit_softcap)
        return out  # [V]

    def transitions(self, before_write, zs, memory, places, anchor: int, candidates: Tensor) -> list[Tensor]:
        """The last write done again with the decided predecessor: one full row per possible predecessor."""
        rows = []
        for slot in range(1, self.config.block_size):
            known = [anchor] if slot == 1 else candidates[slot - 2].tolist()
            keeps = self.without == "decided_predecessor" or (slot == 1 and self.without == "anchor_phi")
            slot_rows = []
            for token in known:
                decided = [self.received(z, anchor)[slot] if keeps else self.phi(token) for z in zs if z is not None]
                x = self.written_again(slot, decided, before_write, memory, places)
                slot_rows.append(self.logits(self.norm("norm", x)))
            rows.append(torch.stack(slot_rows))
        return rows

    def written_again(self, slot: int, decided: list[Tensor], before_write, memory, places) -> Tensor:
        """One slot from the first write that is done again to the end; later layers look at the ordinary pass."""
        c = self.config
        first = c.num_layers - 1 - c.rewrite_layers
        x = before_write[first][slot]
        for layer in range(first, c.num_layers):
            if layer > first:
                x = x + self.attend(layer, x, slot, places[slot], memory[layer])
                if c.placement == "layer":
                    x = x + self.mlp(layer, x)
            x = self.write(layer, x, decided[layer - c.num_layers])
            if c.placement == "mlp":
                x = x + self.mlp(layer, x)
        return x


def rope_frequencies(rope: dict, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, for the rope types "default", "linear" and "llama3"."""
    out = []
    for i in range(head_dim // 2):
        frequency = rope["rope_theta"] ** (-2 * i / head_dim)
        if rope["rope_type"] == "linear":
            frequency /= rope["factor"]
        elif rope["rope_type"] == "llama3":
            turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency = kept * frequency + (1 - kept) * frequency / rope["factor"]
        elif rope["rope_type"] != "default":
            raise ValueError(f"rope type {rope['rope_type']!r} is not written out here")
        out.append(frequency)
    return torch.tensor(out, dtype=torch.float64)


def greedy_walk(unary: Tensor, candidates: Tensor, scores: list[Tensor]) -> list[int]:
    """Left to right: the best candidate given the one just chosen; without scores, each slot's own best."""
    if not scores:
        return unary.argmax(dim=-1).tolist()
    walk, previous = [], 0
    for slot, slot_scores in enumerate(scores):
        previous = int(slot_scores[previous, candidates[slot]].argmax())
        walk.append(int(candidates[slot, previous]))
    return walk
