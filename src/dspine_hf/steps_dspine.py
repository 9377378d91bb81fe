"""Hidden states and attentions of a drafted call, one entry per generated token, as plain generation returns them.

The assisted loop splits a pass over several tokens itself, but takes every cache to keep all rows and every prompt to
be token ids, so windowed attentions come out too wide and the states of a prompt given as embeddings come out empty.
"""

from typing import Any

import torch


class StepRecorder:
    """
    Keeps what each pass returned and splits it by token.

    Args:
        cache: the target's cache, which says how many keys a row of each layer sees.
        hidden_states, attentions: which of the two the user asked for.
    """

    def __init__(self, cache: Any, hidden_states: bool, attentions: bool):
        self._cache = cache
        self._wanted = [n for n, on in (("hidden_states", hidden_states), ("attentions", attentions)) if on]
        self._steps: dict[str, list] = {name: [] for name in self._wanted}

    def add(self, outputs: Any, accepted: int) -> None:
        """A pass decided `accepted` tokens; the first one also ran over the prompt."""
        for name in self._wanted:
            layers = getattr(outputs, name, None)
            steps = self._steps[name]
            if not layers or layers[0] is None:
                continue
            if not steps:
                steps.append(tuple(layers))
            elif name == "hidden_states":
                steps.extend(tuple(layer[:, i : i + 1] for layer in layers) for i in range(accepted))
            else:
                windows = self._windows(len(layers))
                pairs = list(zip(layers, windows, strict=True))
                steps.extend(tuple(_row(layer, i, window) for layer, window in pairs) for i in range(accepted))

    def replace(self, result: Any) -> None:
        """Puts the recorded steps in the place of those that the loop split."""
        for name, steps in self._steps.items():
            if steps:
                setattr(result, name, tuple(steps))

    def _windows(self, layers: int) -> list[int | None]:
        """Per layer: keys that one row sees at most; 0 for a static cache, whose width never changes."""
        cached = self._cache.layers
        if len(cached) != layers:
            return [None] * layers
        static = [hasattr(layer, "max_cache_len") for layer in cached]
        windows = [
            getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None for layer in cached
        ]
        return [0 if fixed else window for fixed, window in zip(static, windows, strict=True)]


def _row(attention: torch.Tensor, i: int, window: int | None) -> torch.Tensor:
    """Row i of `[1, heads, rows, keys]` over the keys that plain generation would have had: `[1, heads, 1, keys]`."""
    row = attention[:, :, i : i + 1]
    if window == 0:
        return row
    end = attention.shape[-1] - (attention.shape[-2] - 1 - i)
    start = 0 if window is None else max(0, end - window)
    return row[..., start:end]
