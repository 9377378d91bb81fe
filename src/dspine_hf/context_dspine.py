"""The drafter's context during one call: features of verified rows, at their absolute positions, kept across turns."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from .cache_dspine import DraftCache
from .compat_dspine import FeatureTaps


@dataclass
class _Turn:
    drafter: "weakref.ref[Any]"
    cache: DraftCache
    length: int  # rows of the target's cache that the context has seen go by
    marks: torch.Tensor  # of the last of these rows [rows], see `_row_marks`


_TURNS: "weakref.WeakKeyDictionary[Any, _Turn]" = weakref.WeakKeyDictionary()


def _row_marks(target_cache: Any) -> torch.Tensor:
    """
    A number for each row that the cache holds, `[rows]`, the latest last: the sum of the bits of its last key.

    The key in the last layer hangs on every token up to the row's, so that equal marks mean an equal text so far.
    """
    layer = [layer for layer in target_cache.layers if getattr(layer, "keys", None) is not None][-1]
    keys = layer.keys[0][:, : int(layer.get_seq_length())]  # [heads, rows, head_dim]; a window holds the latest rows
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[keys.element_size()]
    return keys.contiguous().view(bits).sum((0, 2), dtype=torch.int64)


def _take_turn(target_cache: Any, drafter: Any, past_length: int) -> DraftCache | None:
    """The context that an earlier call left with this cache, cut back if the cache was; None if it is no use.

    It is none if rows were written since that the drafter has not seen, also where as many had been cropped before.
    """
    turn = _TURNS.pop(target_cache, None)
    if turn is None or turn.drafter() is not drafter or turn.length < past_length:
        return None
    cropped = turn.length - past_length
    kept = turn.cache.context_length - cropped
    if kept < 0 or cropped >= len(turn.marks) or turn.marks[-1 - cropped] != _row_marks(target_cache)[-1]:
        return None
    turn.cache.crop(kept)
    return turn.cache


class DraftContext:
    """
    Reads the target's passes into the drafter's K/V cache.

    Args:
        drafter: the draft model.
        taps: where the features are in a target output.
        target_cache: the target's cache, before its first pass.
        past_length: rows it already holds.
    """

    def __init__(self, drafter: Any, taps: FeatureTaps, target_cache: Any, past_length: int):
        self._drafter = drafter
        self._taps = taps
        self._target_cache = target_cache
        earlier = _take_turn(target_cache, drafter, past_length) if past_length else None
        self.cache: DraftCache = drafter.new_cache() if earlier is None else earlier
        self._prompt_positions: torch.Tensor | None = None  # [1, prompt rows in the cache after prefill]
        self._prompt_mask: torch.Tensor | None = None

    def begin(self, model_kwargs: dict[str, Any], length: int, device: torch.device) -> None:
        """
        Notes the prompt's positions and padding before the first pass.

        Args:
            model_kwargs: the loop's keyword arguments, `position_ids` and `attention_mask` among them or not.
            length: rows in the target's cache after the first pass.
            device: of the input ids.
        """
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if positions is not None:
            positions = positions[0] if positions.dim() == 3 else positions
        elif mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        else:
            positions = torch.arange(length, device=device).unsqueeze(0)
        self._prompt_positions, self._prompt_mask = positions, mask

    def position(self, new_tokens: int) -> torch.Tensor:
        """The absolute position `[1]` of the `new_tokens`-th token after the prompt, counted from 1."""
        assert self._prompt_positions is not None
        return self._prompt_positions[:, -1] + new_tokens

    def append_prompt(self, outputs: Any) -> None:
        """Appends every row of the first pass but padding."""
        features = self._features(outputs, None)
        assert self._prompt_positions is not None
        rows = features.shape[1]
        positions = self._prompt_positions[:, -rows:].to(features.device)
        if self._prompt_mask is not None:
            real = self._prompt_mask[0, -rows:].to(features.device).bool()
            features, positions = features[:, real], positions[:, real]
        self._drafter.extend_context(self.cache, features, positions)

    def append_verified(self, outputs: Any, rows: int, first_position: torch.Tensor) -> None:
        """Appends the first `rows` rows of a verification pass, which began at `first_position` `[1]`."""
        features = self._features(outputs, rows)
        positions = first_position.to(features.device)[:, None] + torch.arange(rows, device=features.device)
        self._drafter.extend_context(self.cache, features, positions)

    def _features(self, outputs: Any, rows: int | None) -> torch.Tensor:
        """`[1, rows, L * d]` on the drafter's device."""
        taps = self._taps.read(outputs)
        device, dtype = self._drafter.device, self._drafter.dtype
        return torch.cat([tap[:, :rows].to(device=device, dtype=dtype) for tap in taps], dim=-1)

    def keep(self, length: int) -> None:
        """Leaves the context with the target's cache, which now holds `length` rows, for the next turn."""
        _TURNS[self._target_cache] = _Turn(
            weakref.ref(self._drafter), self.cache, length, _row_marks(self._target_cache)
        )
