"""What a drafter needs of its target: input embeddings, output head, and the check that it is the right one."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .configuration_dspine import DSpineConfig
from .transfer_dspine import TransferSpace

# Shared-out weights that a drafter reads whole, with their versions: one copy per process while the weight lives.
_GATHERED: Any = WeakIdKeyDictionary()
# By W of a transfer space: the head, the versions and the dtype that its table was made of, and the table.
_TABLES: Any = WeakIdKeyDictionary()
TABLE_DEVICES, TABLE_BYTES, TABLE_ROWS = ("cuda",), 2**28, 8192
FINGERPRINT_ROWS = 16
FINGERPRINT_CORRELATION = 0.8


class TargetView:
    """The target's embedding and head as the drafter uses them. Made per call; never a submodule, never saved.

    Args:
        model: the target causal LM.
        config: the drafter's config (logit scale, soft-cap and embedding scale).
        transfer: the drafter's transfer space.
        dtype, device: where the drafter computes.
    """

    def __init__(
        self, model: nn.Module, config: DSpineConfig, transfer: TransferSpace, dtype: torch.dtype, device: torch.device
    ):
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._weight, self._bias = resident(self._head, "weight"), resident(self._head, "bias")
        self._config = config
        self._transfer = transfer
        self._dtype, self._device = dtype, device
        self._table: torch.Tensor | None = None

    @property
    def head_weight(self) -> torch.Tensor:
        """The output embedding E [V, d]."""
        return self._weight

    @property
    def logit_shape(self) -> tuple[float, float | None, torch.Tensor | None] | None:
        """Scale, soft-cap and bias [V] that turn E h into logits; None when logits are E h."""
        bias = None if self._bias is None else self._bias.to(self._device)
        shape = (self._config.logit_scale, self._config.logit_softcap, bias)
        return None if shape == (1.0, None, None) else shape

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of ids [..], scaled as the target scales them: [.., d]."""
        device = self._embedding.weight.device
        if device.type != "meta":  # an offloaded embedding moves its inputs itself
            ids = ids.to(device)
        rows = self._embedding(ids) * self._config.embedding_scale
        return rows.to(device=self._device, dtype=self._dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Output-embedding rows E[ids]: [..] -> [.., d], in the head's dtype, on the drafter's device."""
        return F.embedding(ids.to(self._weight.device), self._weight).to(self._device)

    def phi(self, ids: torch.Tensor) -> torch.Tensor:
        """Transfer features of tokens: [..] -> [.., r], fp32."""
        if self._table is not None:
            return F.embedding(ids.to(self._device), self._table).float()
        return self._transfer(self.rows(ids))

    def tabulated(self, most: int = TABLE_BYTES) -> "TargetView":
        """
        This view, on a CUDA device with phi of all tokens at hand: a look-up instead of a product.

        The table [V, r], in the drafter's dtype, is made once and lives as long as the drafter, while neither model's
        weights change. Writes round messages to that dtype anyway.

        Args:
            most: bytes; where the table takes more, there is none.
        """
        weight, W = self._weight, self._transfer.W
        own = self._head is not None and self._head.weight is weight
        at_hand = own and weight.device == W.device == self._device
        fits = len(weight) * len(W) * self._dtype.itemsize <= most
        if at_hand and fits and self._device.type in TABLE_DEVICES:
            self._table = _features(weight, self._transfer, self._dtype)
        return self

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the whole vocabulary: [.., d] -> [.., V], fp32, on the drafter's device."""
        return self._finish(self._raw(hidden).float(), None)

    def best(self, hidden: torch.Tensor, k: int, topk: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best of `logits`, descending: hidden [.., d] -> scores [.., k] fp32 and their ids [.., k].

        topk: finds them among unfinished scores, whose order a positive scale and a soft-cap leave as it is.
        """
        if self._config.logit_scale <= 0:
            return topk(self.logits(hidden), k)
        raw, ids = topk(self._raw(hidden), k)
        return self._finish(raw, ids), ids

    def _raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """E h with the head's bias, in the head's dtype, at most fp32: [.., d] -> [.., V], on the drafter's device."""
        weight, bias = self._weight, self._bias
        hidden = hidden.to(device=weight.device, dtype=weight.dtype)
        raw = self._head(hidden) if self._head.weight is weight else F.linear(hidden, weight, bias)
        return raw.to(self._device, torch.float32 if raw.dtype is torch.float64 else raw.dtype)

    def row_logits(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Scores of given tokens: hidden [.., m, d], ids [.., n] -> [.., m, n], fp32; the same numbers as `logits`."""
        rows = self.rows(ids)
        raw = torch.matmul(hidden.to(rows.dtype), rows.transpose(-1, -2)).float()
        if self._bias is not None:
            raw = raw + self._bias.to(self._device).float()[ids].unsqueeze(-2)
        return self._finish(raw, ids)

    def pair_scores(self, hidden: torch.Tensor, norm: nn.Module, ids: torch.Tensor, scores: Callable) -> torch.Tensor:
        """`row_logits` of norm(hidden), computed by `scores` (of `ops_dspine`) where the head is at hand.

        hidden: [batch, slots, m, d], before the drafter's final norm. ids: [batch, slots, n]. Returns [.., m, n] fp32.
        """
        if self._weight.device != hidden.device or self._weight.dtype is torch.float64:
            return self.row_logits(norm(hidden), ids)
        shape = (self._bias, self._config.logit_scale, self._config.logit_softcap)
        return scores(hidden, norm.weight, norm.variance_epsilon, self._weight, ids, *shape)

    def _finish(self, raw: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        if self._config.logit_scale != 1.0:
            raw = raw * self._config.logit_scale
        cap = self._config.logit_softcap
        return raw if cap is None else torch.tanh(raw / cap) * cap


def embedding_fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """Pairwise cosines of some fixed rows of an output embedding [V, d]: [16, 16], fp32.

    A cast or quantised copy of the same embedding has nearly the same cosines; another embedding has not.
    """
    count = min(FINGERPRINT_ROWS, weight.shape[0])
    ids = torch.linspace(0, (weight.shape[0] - 1) * 0.9, count, device=weight.device).long()
    rows = F.normalize(F.embedding(ids, weight.detach()).float(), dim=-1)
    cosines = torch.zeros(FINGERPRINT_ROWS, FINGERPRINT_ROWS, device=weight.device)
    cosines[:count, :count] = rows @ rows.T
    return cosines


def same_fingerprint(stored: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two fingerprints belong to one embedding; an empty stored fingerprint matches anything."""
    if not bool(stored.any()):
        return True
    index = torch.triu_indices(FINGERPRINT_ROWS, FINGERPRINT_ROWS, offset=1)
    pairs = torch.stack([stored.cpu()[index[0], index[1]], found.cpu()[index[0], index[1]]])
    if bool((pairs[0] - pairs[1]).abs().max() < 1e-3):
        return True
    return bool(torch.corrcoef(pairs)[0, 1] > FINGERPRINT_CORRELATION)


def resident(module: Any, name: str) -> Any:
    """A tensor of a module in memory: of an offloaded module (accelerate) a copy, of one that tensor parallelism
    shares out the whole, gathered once (every process has to ask for it); None where the module has none."""
    tensor = getattr(module, name, None)
    if hasattr(tensor, "full_tensor"):
        return _gathered(tensor)
    if tensor is None or tensor.device.type != "meta":
        return tensor
    hook = getattr(module, "_hf_hook", None)
    stored = getattr(hook, "weights_map", None)
    if hook is None or stored is None:
        raise ValueError(
            f"expected the target's {type(module).__name__} in memory or offloaded by accelerate; found the "
            "meta device, without values. Load the target with from_pretrained."
        )
    return stored[name].to(hook.execution_device)


def _gathered(tensor: Any) -> torch.Tensor:
    found = None if tensor.is_inference() else tensor._version
    version, whole = _GATHERED.get(tensor, (None, None))
    if whole is None or version != found:
        with torch.inference_mode(False), torch.no_grad():  # a later call may train with what this one gathers
            whole = tensor.full_tensor()
        _GATHERED[tensor] = found, whole
    return whole


@torch.no_grad()
def _features(weight: torch.Tensor, transfer: TransferSpace, dtype: torch.dtype) -> torch.Tensor | None:
    """phi of the rows of `weight` [V, d] as a table [V, r], made once; None where changes cannot be noticed."""
    parts = (weight, transfer.W, transfer.c)
    if any(part.is_inference() for part in parts):
        return None
    found, versions, table = _TABLES.get(transfer.W, (lambda: None, None, None))
    made_of = (*(part._version for part in parts), dtype)
    if found() is not weight or versions != made_of:
        table = torch.cat([transfer(rows).to(dtype) for rows in weight.split(TABLE_ROWS)])
        _TABLES[transfer.W] = weakref.ref(weight), made_of, table
    return table


def table_of(model: Any) -> torch.Tensor | None:
    """The table that [`TargetView.tabulated`] made for a drafter; None for one without, and for other models."""
    transfer = getattr(model, "transfer", None)
    return _TABLES.get(transfer.W, (None, None, None))[2] if isinstance(transfer, TransferSpace) else None


def output_head(model: nn.Module) -> nn.Module:
    """
    The target's output head, once it is sure that a drafter can read its rows.

    Raises:
        ValueError: no head, a head of packed (quantised) weights, or a target whose layers pass on several streams.
    """
    name, head = type(model).__name__, model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ValueError(f"{name} has no output embedding; a DSpine drafter needs a causal LM as target.")
    streams = getattr(model.config.get_text_config(decoder=True), "altup_num_inputs", None) or 1
    if streams > 1:
        raise ValueError(
            f"expected a target whose layers pass on one hidden state per token; {name} passes on {streams} "
            "(altup_num_inputs), which a DSpine drafter cannot read. Generate without `assistant_model`."
        )
    weight = getattr(head, "weight", None)
    plain = isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point()
    if not plain or type(weight).__module__.startswith("torchao"):
        found = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, torch.Tensor) else "no plain weight"
        raise ValueError(
            f"expected {name}'s output head with a floating-point weight [vocabulary, width]; found a quantised "
            f"{type(head).__name__} ({found}). A drafter reads the head's rows: load the target with 'lm_head' among "
            "the modules that its quantisation config leaves alone (llm_int8_skip_modules, modules_to_not_convert)."
        )
    return head


def slots_within_positions(text: Any, anchor: int) -> int | None:
    """
    How many tokens may be drafted behind position `anchor`, so that the pass that verifies them treats every row as
    passes of one token would. None: any number.

    Learned positions end somewhere; "dynamic" and "longrope" rotary embeddings rotate a whole pass by its last row.

    Args:
        text: the config of the target's text part.
    """
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        return None if limit is None else max(0, limit - 1 - anchor)
    parts = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    rooms = []
    for part in parts:
        kind, first = part.get("rope_type"), part.get("original_max_position_embeddings") or limit
        if kind in ("dynamic", "longrope") and first is not None and not (kind == "longrope" and anchor >= first):
            rooms.append(max(0, first - 1 - anchor))
    return min(rooms, default=None)


def last_position(model: nn.Module) -> int | None:
    """The last position that a target has a row for in its table of positions; None: it has no such table."""
    text = model.config.get_text_config(decoder=True)  # type: ignore[operator]
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None or getattr(text, "rope_parameters", None):
        return None
    words = model.get_input_embeddings()  # type: ignore[operator]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    learned = any(limit <= table.num_embeddings <= limit + 2 for table in tables)  # some keep two rows for padding
    fixed = any(name.endswith("embed_positions") and len(rows) == limit for name, rows in model.named_buffers())
    return limit - 1 if learned or fixed else None


def refuse_position(last: int | None, positions: torch.Tensor | int) -> None:
    """Raise ValueError if any position is behind `last`, see `last_position`; a GPU would say so far too late."""
    if last is not None and (found := int(torch.as_tensor(positions).max())) > last:
        raise ValueError(
            f"expected positions in 0..{last}, the target's position embeddings; found {found}. Shorten the prompt, "
            "or ask for fewer tokens with max_new_tokens."
        )


def refuse_unknown_tokens(target: Any, input_ids: torch.Tensor) -> None:
    """Raise ValueError for ids [1, length] that the target has no embedding for; a GPU would say so far too late."""
    if target.config.get_text_config(decoder=True) is not target.config or not input_ids.numel():
        return  # a multimodal target may replace ids that mark images
    rows = target.get_input_embeddings().weight.shape[0]
    for found in (int(input_ids.max()), int(input_ids.min())):
        if not 0 <= found < rows:
            raise ValueError(
                f"expected token ids in 0..{rows - 1}, the target's embeddings; found {found} in the prompt. Use the "
                "tokenizer that belongs to the target, or resize the target's embeddings."
            )


def refuse_wrong_shapes(config: DSpineConfig, model: nn.Module) -> None:
    """Raise ValueError, naming the cure, unless `model` has the shapes this drafter was made for."""
    head, text = output_head(model), model.config.get_text_config(decoder=True)
    vocab, width = head.weight.shape
    layers = text.num_hidden_layers
    wanted = (config.hidden_size, config.vocab_size, config.num_target_layers)
    if (width, vocab, layers) != wanted:
        raise ValueError(
            f"this drafter was trained for hidden_size={wanted[0]}, vocab_size={wanted[1]} and {wanted[2]} layers; "
            f"the target has {width}, {vocab} and {layers}. Load the drafter that belongs to it, or train one with "
            "'dspine train --target ...'."
        )
