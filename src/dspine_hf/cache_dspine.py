"""The draft K/V cache: context is appended, the block's own K/V never stay."""

from typing import Any

import torch


class DraftCache:
    """Keys and values of the verified context, one pair of tensors per drafter layer.

    Made per call and never stored on the module. Keys are kept rotated, at their absolute positions.

    Args:
        num_layers: number of drafter layers.
        window: attend to at most this many of the latest rows (`config.context_window`); None: to all.
    """

    GROWTH = 256

    def __init__(self, num_layers: int, window: int | None = None):
        self.window = window
        self.context_length = 0
        self._keys: list[Any] = [None] * num_layers  # tensors, once there are rows
        self._values: list[Any] = [None] * num_layers

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append context rows of one layer: [batch, kv_heads, rows, head_dim]. Call `advance` once every layer did."""
        start, stop = self.context_length, self.context_length + keys.shape[2]
        if torch.is_grad_enabled() and keys.requires_grad:
            if start:
                keys = torch.cat([self._keys[layer_idx][:, :, :start], keys], dim=2)
                values = torch.cat([self._values[layer_idx][:, :, :start], values], dim=2)
            self._keys[layer_idx], self._values[layer_idx] = keys, values
            return
        for store, new in ((self._keys, keys), (self._values, values)):
            store[layer_idx] = self._with_room(store[layer_idx], new, stop)
            store[layer_idx][:, :, start:stop] = new

    def advance(self, rows: int) -> None:
        """Count `rows` more context rows, after every layer appended them."""
        self.context_length += rows

    def join(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context followed by the block's own rows, for one attention call; the block's rows are not kept.

        Returns keys and values [batch, kv_heads, min(context, window) + block, head_dim].
        """
        if not self.context_length:
            return keys, values
        start = 0 if self.window is None else max(0, self.context_length - self.window)
        stop = self.context_length + keys.shape[2]
        joined = []
        for store, new in ((self._keys, keys), (self._values, values)):
            if torch.is_grad_enabled() and new.requires_grad:
                joined.append(torch.cat([store[layer_idx][:, :, start : self.context_length], new], dim=2))
                continue
            store[layer_idx] = self._with_room(store[layer_idx], new, stop)
            store[layer_idx][:, :, self.context_length : stop] = new
            joined.append(store[layer_idx][:, :, start:stop])
        return joined[0], joined[1]

    def crop(self, length: int) -> None:
        """Keep the first `length` context rows. Raises ValueError when there are fewer."""
        if not 0 <= length <= self.context_length:
            raise ValueError(f"cannot crop a context of {self.context_length} rows to {length}.")
        self.context_length = length

    def _with_room(self, store: torch.Tensor | None, new: torch.Tensor, rows: int) -> torch.Tensor:
        frozen = store is not None and store.is_inference() and not torch.is_inference_mode_enabled()
        if store is not None and store.shape[2] >= rows and not frozen:
            return store
        capacity = max(rows + self.GROWTH, rows * 3 // 2)
        grown = new.new_empty(new.shape[0], new.shape[1], capacity, new.shape[3])
        if store is not None and self.context_length:
            grown[:, :, : self.context_length] = store[:, :, : self.context_length]
        return grown
