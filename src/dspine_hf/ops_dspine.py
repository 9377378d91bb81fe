"""The eager reference of every DSpine operation, one plain function each, and the choice of eager or fused ones."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import ModuleType

import torch
import torch.nn.functional as F

# Where the kernels are looked for, in this order: the package's own, an installed package, a repository of the Hub.
KERNELS = ("dspine_hf.kernels", "dspine_kernels")
FUSED_CANDIDATES = 32  # more of them a slot, and torch's own operations run
COPIED_BYTES = 2**28  # of the head's rows at a time
KERNELS_REPOSITORY, KERNELS_VERSION = "dspine-hf/dspine-kernels", 1


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Weightless RMS norm over the last dimension, computed and returned in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with the weight w [d], in the dtype of x: [.., d] -> [.., d]."""
    return w * rms(x, eps).to(x.dtype)


def rotated_heads(x: torch.Tensor, w: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Every head's RMSNorm with the weight w [head_dim], and its rotary position.

    Shapes: x [batch, rows, heads * head_dim], cos and sin [batch, rows, head_dim] -> [batch, heads, rows, head_dim].
    """
    return rotated(rms_norm(x.unflatten(-1, (-1, w.shape[0])), w, eps), cos, sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [batch, rows, heads, head_dim], cos and sin as above -> [batch, heads, rows, head_dim]."""
    return (x * cos.unsqueeze(2) + _half_turned(x) * sin.unsqueeze(2)).transpose(1, 2)


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def predicted_feature(n: torch.Tensor, P: torch.Tensor, eps: float) -> torch.Tensor:
    """z = rms(P n): what a slot predicts of its own token, in the transfer space. [.., d] -> [.., r], fp32."""
    return rms(F.linear(n, P), eps)


def gated_write(
    n: torch.Tensor, s: torch.Tensor, A: torch.Tensor, B: torch.Tensor, b: torch.Tensor, U: torch.Tensor
) -> torch.Tensor:
    """U (sigmoid(A n + B s + b) * s): what the message s adds to a slot whose normed state is n.

    Shapes: n [.., d], s [.., r]; A [r, d], B [r, r], b [r], U [d, r]. Leading dimensions broadcast. Returns [.., d].
    """
    s = s.to(n.dtype)
    gate = torch.sigmoid(F.linear(n, A) + F.linear(s, B, b))
    return F.linear(gate * s, U)


def shifted_messages(anchor: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What slots 1..B-1 receive: phi(anchor), then their predecessor's predicted feature.

    Shapes: anchor [.., r], z [.., B-1, r] (features of slots 1..B-1). Returns [.., B-1, r].
    """
    return torch.cat([anchor.unsqueeze(-2).to(z.dtype), z[..., :-1, :]], dim=-2)


def gated_injection(
    h: torch.Tensor, anchor: torch.Tensor, w: torch.Tensor, P: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    b: torch.Tensor, U: torch.Tensor, eps: float, forced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Write each slot's predicted feature into its successor, the anchor's feature into slot 1; slot 0 stays.

    Args:
        h: [.., B, d]. anchor: phi(anchor) [.., r].
        w: weight of the injection's norm [d]. P, A: [r, d]. B: [r, r]. b: [r]. U: [d, r].
        forced: messages [.., B-1, r] that replace the predicted ones where they are not NaN.

    Returns:
        The new h, and the features z [.., B-1, r] fp32 of slots 1..B-1.
    """
    n = rms_norm(h[..., 1:, :], w, eps)
    z = predicted_feature(n, P, eps)
    s = shifted_messages(anchor, z)
    if forced is not None:
        s = torch.where(forced.isnan(), s, forced)
    written = h[..., 1:, :] + gated_write(n, s, A, B, b, U)
    return torch.cat([h[..., :1, :], written], dim=-2), z


def topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of every row, descending: [.., V] -> values [.., k] fp32 and indices [.., k]."""
    values, index = logits.topk(k, dim=-1)
    return values.float(), index


# ---- the transition cache, the walk and the attention of verification -------------------------------------------


def pair_write(
    h: torch.Tensor, n_weight: torch.Tensor, eps: float, s: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    b: torch.Tensor, U: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The write of K alternative messages per slot: h [rows, slots, d], s [rows, slots, K, r] -> [rows, slots, K, d].

    Shapes: n_weight [d], of the injection's norm; A [r, d], B [r, r], b [r], U [d, r].
    """
    n = n_weight * rms(h, eps).to(h.dtype)
    return h.unsqueeze(2) + gated_write(n.unsqueeze(2), s, A, B, b, U)


def pair_scores(
    hidden: torch.Tensor, norm_weight: torch.Tensor, eps: float, head_weight: torch.Tensor, candidates: torch.Tensor,
    bias: torch.Tensor | None = None, scale: float = 1.0, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Logits of every candidate after every predecessor: E[candidates] . RMSNorm(hidden), as the target shapes them.

    Args:
        hidden: states before the final norm [rows, slots, K_prev, d]. norm_weight: the final norm's [d].
        head_weight: E [V, d]. candidates: token ids [rows, slots, K_cur]. bias: [V].
        scale, softcap: `softcap * tanh(scale * (raw + bias) / softcap)`; softcap None: no cap.

    Returns:
        [rows, slots, K_prev, K_cur] fp32.
    """
    n = (norm_weight * rms(hidden, eps).to(hidden.dtype)).to(head_weight.dtype)
    copied = candidates[0].numel() * head_weight[:1].nbytes if len(candidates) else 1
    parts = [t.split(max(1, COPIED_BYTES // copied)) for t in (n, candidates)]
    products = [part @ F.embedding(ids, head_weight).transpose(-1, -2) for part, ids in zip(*parts, strict=True)]
    raw = torch.cat(products).float()
    if bias is not None:
        raw = raw + bias.float()[candidates].unsqueeze(-2)
    raw = raw * scale
    return raw if softcap is None else torch.tanh(raw / softcap) * softcap


def walk_chain(
    candidates: torch.Tensor, first: torch.Tensor, pairs: torch.Tensor, noise: torch.Tensor | None = None,
    seen: torch.Tensor | None = None, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Walk every batch row's block from left to right, as `walk_dspine.walk` does with transformers' warpers.

    Args:
        candidates: token ids [batch, slots, K]. first: slot 1's scores [batch, K].
        pairs: the later slots' scores [batch, slots - 1, R, K], row i after candidate i of the slot before; R is K, or
            1 where slots are independent.
        noise: exponential variables [batch, slots, K] to sample with; None: greedy.
        seen: tokens already in the text, bool [batch, V], for the repetition penalty.
        temperature, top_k, top_p, min_p, repetition_penalty: as in transformers; 1, 0, 1, 0 and 1 change nothing.

    Returns:
        Tokens [batch, slots]; the choices' indices [batch, slots]; log_q [batch, slots, K] fp32, which the tokens were
        drawn from; [batch, slots] fp32, each choice's log-probability before penalty and warpers.
    """
    rows = torch.arange(candidates.shape[0], device=candidates.device)
    seen = seen.clone() if seen is not None else None
    scores, steps = _without_infinities(first), []
    for slot, ids in enumerate(candidates.unbind(1)):
        raw = scores.log_softmax(-1)
        if seen is not None:
            penalised = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
            scores = torch.where(seen.gather(1, ids), penalised, scores)
        if noise is None:
            index = scores.argmax(-1)
            log_q = torch.full_like(scores, float("-inf")).index_put((rows, index), scores.new_zeros(()))
        else:
            scores = _warped(scores, temperature, top_k, top_p, min_p)
            log_q, index = scores.log_softmax(-1), (scores.softmax(-1) / noise[:, slot]).argmax(-1)
        token = ids[rows, index]
        if seen is not None:
            seen[rows, token] = True
        steps.append((token, index, log_q, raw[rows, index]))
        if slot + 1 < candidates.shape[1]:
            scores = _without_infinities(pairs[rows, slot, index if pairs.shape[2] > 1 else 0])
    tokens, path, log_q, chain = (torch.stack(column, dim=1) for column in zip(*steps, strict=True))
    return tokens, path, log_q, chain


def _without_infinities(scores: torch.Tensor) -> torch.Tensor:
    return scores.float().nan_to_num(nan=-1e30, posinf=1e30, neginf=-1e30)


def _warped(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Transformers' warpers on rows of scores [batch, K]: -inf where a candidate is removed."""
    scores = scores / temperature
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], float("-inf"))
    if top_p < 1.0:
        ascending, order = scores.sort(dim=-1, stable=True)
        removed = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        removed[:, -1] = False
        scores = scores.masked_fill(removed.scatter(1, order, removed), float("-inf"))
    if min_p > 0.0:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), float("-inf"))
    return scores


def verify_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, limit: torch.Tensor,
    scale: float | None = None, window: int = 0, softcap: float = 0.0, splits: int = 0,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention by limits: row t of batch row b sees the keys start[b]..limit[b, t], at most `window` of them.

    With a tree, the key of row i lies in column limit[b, 0] + i, but stands at place limit[b, i] of the text, and row
    t sees it iff bit i of tree[b, t] is set.

    Args:
        q: [batch, heads, rows, head_dim]. k, v: the cache [batch, kv_heads, capacity, head_dim].
        start: first visible key [batch]. limit: last visible key [batch, rows]; -1 for a row that is padding. With a
            tree, the place of every row in the text, that of its root first.
        scale: what q k^T is multiplied by; None: head_dim ** -0.5.
        window: how many keys a row sees at most; 0: all.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0: as they are.
        splits: means nothing here.
        tree: which rows every row sees, itself among them: int64 [batch, rows], bit i stands for row i. At most 64
            rows, row 0 the root. None: rows see all keys up to their limits.

    Returns:
        [batch, heads, rows, head_dim] in q's dtype; zeros for a row that sees nothing.
    """
    j, last = torch.arange(k.shape[2], device=k.device), limit.unsqueeze(-1)
    place = j  # of a key in the text
    if tree is None:
        visible = j <= last  # [batch, rows, capacity]
    else:
        i = j - last[:, :1]  # [batch, 1, capacity]
        own, row = (i >= 0) & (i < limit.shape[1]), i.clamp(0, limit.shape[1] - 1)
        seen = (tree.unsqueeze(-1) >> row) & 1 == 1
        visible = (last >= 0) & ((i < 0) | (own & seen))
        place = torch.where(own, limit.unsqueeze(1).gather(2, row), j)
    visible = visible & (j >= start.view(-1, 1, 1))
    if window:
        visible = visible & (place > last - window)
    visible = visible.unsqueeze(1)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap:
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
        scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
        out = torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return out.masked_fill(~visible.any(-1, keepdim=True), 0.0)


# ---- which of them run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ops:
    """The operations of a draft pass: these eager ones, or the fused ones, which have their names and arguments."""

    rms_norm: Callable = rms_norm
    rotated_heads: Callable = rotated_heads
    swiglu: Callable = swiglu
    gated_injection: Callable = gated_injection
    topk: Callable = topk
    pair_write: Callable = pair_write
    pair_scores: Callable = pair_scores
    walk_chain: Callable = walk_chain
    verify_attention: Callable = verify_attention

    def at(self, candidates: int) -> "Ops":
        """Those for slots of so many candidates: the eager ones where the kernels do not take as many.

        Without a warning: this is how a slot is sampled from S candidates, while greedy drafts from K stay fused.
        """
        return self if candidates <= FUSED_CANDIDATES else EAGER


@dataclass(frozen=True)
class FusedOps(Ops):
    """The fused operations, and those of trees of drafts: their eager counterparts are in `fast_tree.py` and
    `static_cache.py`."""

    grow_tree: Callable = field(kw_only=True)
    follow_tree: Callable = field(kw_only=True)
    move_columns: Callable = field(kw_only=True)
    addresses: Callable = field(kw_only=True)


EAGER = Ops()
# Under torch.compile, Inductor fuses these with what stands beside them; autocast would give them two dtypes.
SIMPLE = ("rms_norm", "rotated_heads", "swiglu")
_CHOSEN: dict[tuple, tuple[Ops, Ops]] = {}  # and the same with the simple ones eager


def fused_ops(device: str, dtype: torch.dtype, rank: int, candidates: int) -> Ops:
    """The fused operations for these shapes; the eager ones, with one warning that says why, where they cannot run.

    Inside torch.compile and under autocast, those named in `SIMPLE` are the eager ones.

    Args:
        device: type of the drafter's device. dtype: of its weights.
        rank: r, the width of the transfer space. candidates: K.
    """
    chosen = _CHOSEN.get((device, dtype, rank, candidates))  # a look-up, so that torch.compile can follow it
    fused, beside_others = _choose(device, dtype, rank, candidates) if chosen is None else chosen
    if fused is EAGER or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device)):
        return fused
    return beside_others


def _choose(device: str, dtype: torch.dtype, rank: int, candidates: int) -> tuple[Ops, Ops]:
    kernels, reason = find_kernels()
    if kernels is not None:
        reason = kernels.why_not(device, dtype=dtype, rank=rank, candidates=candidates) or _lacking(kernels)
    if kernels is None or reason:
        warnings.warn(f"use_fused_kernels=True: {reason}; the eager operations run.", stacklevel=3)
        chosen: tuple[Ops, Ops] = EAGER, EAGER
    else:
        fused = FusedOps(**{op.name: getattr(kernels, op.name) for op in fields(FusedOps)})
        chosen = fused, replace(fused, **{name: getattr(EAGER, name) for name in SIMPLE})
    _CHOSEN[device, dtype, rank, candidates] = chosen
    return chosen


def _lacking(kernels: ModuleType) -> str:
    """What a kernel package has not that this code calls, as half a sentence; empty where it has everything."""
    missing = [op.name for op in fields(FusedOps) if not hasattr(kernels, op.name)]
    if not missing:
        return ""
    return f"the kernel package {kernels.__name__} is too old, it lacks {', '.join(missing)} (update it)"


def find_kernels() -> tuple[ModuleType | None, str]:
    """The kernel package and "", or None and the reason why there is none.

    The repository of the Hub is only asked when the `kernels` library is installed, which downloads it once, refuses
    organisations that it does not trust, and takes a local build from LOCAL_KERNELS=dspine-hf/dspine-kernels=<folder>.
    """
    for name in KERNELS:
        try:
            return importlib.import_module(name), ""
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    get_kernel = getattr(_kernels_library(), "get_kernel", None)
    if get_kernel is None:
        return None, f"neither {' nor '.join(KERNELS)} is installed, nor the kernels library"
    try:
        return get_kernel(KERNELS_REPOSITORY, version=KERNELS_VERSION), ""
    except Exception as error:  # no network, no such repository, no trust, no build for this machine
        return None, f"the kernels library cannot load {KERNELS_REPOSITORY} ({type(error).__name__}: {error})"


def _kernels_library() -> ModuleType | None:
    try:
        return importlib.import_module("kernels")
    except ImportError:
        return None
