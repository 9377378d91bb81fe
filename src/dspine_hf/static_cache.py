"""Static key/value storage for rows of different lengths: new rows go where they belong, none are ever taken back.

Every batch row owns a run of columns. A pass writes the keys and values of its rows at the columns of their tokens;
a rejected row is overwritten by the next pass, and until then no mask shows it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .ops_dspine import EAGER, FusedOps, Ops

FIRST_BUCKET = 512
MOVED_AT_ONCE = 64  # columns of a row; more of them, and torch's own operations run


@dataclass
class Places:
    """
    Where the rows of one pass go.

    Attributes:
        index: `[batch, rows]`, the column of every row, on the device.
        columns: how many columns attention looks at, an upper bound of all that are in use.
        first: the column of the first row where all batch rows share it and the host knows it, else None.
        batch: `[batch, 1]`, the number of every batch row.
    """

    index: torch.Tensor
    columns: int
    first: int | None = None
    batch: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.batch = torch.arange(self.index.shape[0], device=self.index.device)[:, None]


def column_bucket(used: int, capacity: int) -> int:
    """How many columns a recorded or compiled pass looks at: a power of two that holds `used`, at most all."""
    bucket = FIRST_BUCKET
    while bucket < used:
        bucket *= 2
    return min(bucket, capacity)


def write(store: torch.Tensor, rows: torch.Tensor, places: Places) -> None:
    """Writes `rows` `[batch, heads, rows, width]` into `store` `[batch, heads, capacity, width]`."""
    if places.first is not None:
        store[:, :, places.first : places.first + rows.shape[2]] = rows
        return
    # Not scatter_, for which torch.compile copies the whole store and back.
    batch, index = places.batch.to(store.device), places.index.to(store.device)
    store[batch, :, index] = rows.transpose(1, 2)  # [batch, rows, heads, width]


class StaticRows:
    """The keys and values of one layer: `[batch, heads, capacity, width]` each, made when the first rows arrive."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.keys: Any = None
        self.values: Any = None

    def put(self, keys: torch.Tensor, values: torch.Tensor, places: Places) -> None:
        """Writes the rows of one pass, `[batch, heads, rows, width]` each."""
        if self.keys is None:
            batch, heads, _, width = keys.shape
            # Zeros: a column that no mask shows must still be a finite number.
            self.keys = keys.new_zeros(batch, heads, self.capacity, width)
            self.values = values.new_zeros(batch, values.shape[1], self.capacity, values.shape[3])
        write(self.keys, keys, places)
        write(self.values, values, places)

    def move(self, source: torch.Tensor, places: Places) -> None:
        """Copies the columns `source` `[batch, rows]` to `places`, which has as many."""
        for store in (self.keys, self.values):
            if store is not None:
                write(store, store[places.batch.to(store.device), :, source.to(store.device)].transpose(1, 2), places)

    def clear(self) -> None:
        """All zeros again."""
        if self.keys is not None:
            self.keys.zero_()
            self.values.zero_()


class Pass:
    """Where the rows of the pass that runs go. The layers of a cache share one: if they knew their cache instead, a
    freed cache would keep its memory until Python looks for cycles."""

    def __init__(self) -> None:
        self.places = Places(torch.zeros(1, 0, dtype=torch.long), 0, 0)


class RaggedLayer(CacheLayerMixin):
    """
    One layer of a target's cache. Sliding layers keep every row too: their window is in the mask.

    Args:
        current: where rows go.
        capacity: columns.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, current: Pass, capacity: int):
        super().__init__()
        self._pass, self._capacity = current, capacity
        self.rows = StaticRows(capacity)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the pass's rows; returns all columns that attention looks at."""
        self.is_initialized = True
        places = self._pass.places
        self.rows.put(key_states, value_states, places)
        self.keys, self.values = (t[:, :, : places.columns] for t in (self.rows.keys, self.rows.values))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._pass.places.columns, 0

    def get_seq_length(self) -> int:
        return self._pass.places.first or 0

    def get_max_length(self) -> int:
        return self._capacity

    def get_max_cache_shape(self) -> int:
        return self._capacity


class RaggedCache(Cache):
    """
    A target's cache of static storage, one run of columns per batch row.

    Args:
        num_layers: layers that keep keys and values.
        capacity: columns.
    """

    def __init__(self, num_layers: int, capacity: int):
        self.capacity, self._pass = capacity, Pass()
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self._grouped = 0  # where the first of the stores lay then
        super().__init__(layers=[RaggedLayer(self._pass, capacity) for _ in range(num_layers)])

    @property
    def places(self) -> Places:
        """Where the rows of the pass that runs go."""
        return self._pass.places

    @places.setter
    def places(self, places: Places) -> None:
        self._pass.places = places

    def move(self, source: torch.Tensor, places: Places, ops: Ops = EAGER) -> None:
        """Copies columns of every layer, see [`StaticRows.move`]; the fused operations move those of all at once, as
        many as their kernel takes."""
        if not isinstance(ops, FusedOps) or source.shape[1] > MOVED_AT_ONCE:
            for layer in self.layers:
                layer.rows.move(source, places)
            return
        for stores, addresses in self._alike(ops):
            device = addresses.device
            ops.move_columns(stores, addresses, source.to(device), places.index.to(device))

    def _alike(self, ops: FusedOps) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        """The stores by shape, dtype and device, and where they lie: they stay there, but those of a copy do not."""
        if not self._groups or self._groups[0][0][0].data_ptr() != self._grouped:
            groups: dict[tuple, list[torch.Tensor]] = {}
            for rows in (layer.rows for layer in self.layers):
                for store in (rows.keys, rows.values):
                    if store is not None:
                        groups.setdefault((store.shape, store.dtype, store.device), []).append(store)
            self._groups = [(stores, ops.addresses(stores)) for stores in groups.values()]
            self._grouped = self._groups[0][0][0].data_ptr() if self._groups else 0
        return self._groups

    def clear(self) -> None:
        """Makes every row zero, for another call."""
        for layer in self.layers:
            layer.rows.clear()


class RaggedDraftCache:
    """
    The drafter's context under the same columns as the target's: the interface of [`DraftCache`], static storage.

    Args:
        num_layers: drafter layers.
        capacity: columns.
    """

    def __init__(self, num_layers: int, capacity: int):
        self.places: Places = Places(torch.zeros(1, 0, dtype=torch.long), 0, 0)
        self.first_column = 0  # columns before it are left out of what `join` returns
        self.layers = [StaticRows(capacity) for _ in range(num_layers)]

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes context rows of one layer, `[batch, kv_heads, rows, head_dim]` each."""
        self.layers[layer_idx].put(keys, values, self.places)

    def advance(self, rows: int) -> None:
        """Nothing is counted: which columns are context, the lengths of the batch rows say."""

    def join(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the block's rows, which later rows overwrite; returns all columns that the block looks at."""
        layer = self.layers[layer_idx]
        layer.put(keys, values, self.places)
        seen = slice(self.first_column, self.places.columns)
        return layer.keys[:, :, seen], layer.values[:, :, seen]

    def clear(self) -> None:
        """Makes every row zero, for another call."""
        for layer in self.layers:
            layer.clear()
