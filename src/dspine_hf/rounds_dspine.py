"""What surrounds the assisted loop: stopping criteria and streamer token by token, and the trims at its end.

The loop of transformers tests criteria and feeds the streamer once per round, when several tokens are accepted.
Here both see one token at a time, exactly as in plain generation, and what was accepted beyond the stop is cut off.
"""

import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)


class StreamerProxy:
    """Holds a round's tokens until the criteria have passed them, then hands them on one by one."""

    def __init__(self, streamer: Any):
        self._streamer = streamer
        self._held: torch.Tensor | None = None  # [n]

    def put(self, value: torch.Tensor) -> None:
        """The loop's accepted tokens `[1, n]`, on the CPU."""
        self._held = value[0]

    def release(self, count: int) -> None:
        """Hands the next `count` tokens to the user's streamer, one `[1]` tensor each."""
        if self._held is None:
            return
        for token in self._held[:count].split(1):
            self._streamer.put(token)
        self._held = self._held[count:]

    def end(self) -> None:
        self._streamer.end()


class CriteriaProxy(StoppingCriteriaList):
    """
    Replays the call's criteria once for every accepted token and remembers where the first one stopped.

    Length, end-of-sequence and time criteria are decided for a whole round without reading a tensor back; the rest are
    called per token with the prefix and the scores that plain generation would give them.

    Args:
        criteria: the call's criteria.
        prompt_length: tokens before the first new one.
        eos: the end-of-sequence ids at which the loop itself cuts a round (`[n]`, or None).
        streamer: released token by token as the criteria pass.

    Attributes:
        cut: length of the sequence up to and including the token that stopped the call; None while none did, or when
            it stopped at a round's last token.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        prompt_length: int,
        eos: torch.Tensor | None,
        streamer: StreamerProxy | None,
    ):
        super().__init__(criteria)
        self.cut: int | None = None
        self._prompt_length = prompt_length
        self._tested = prompt_length
        self._streamer = streamer
        self._replayed = []
        self._eos = None
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria and criterion.eos_token_id is eos:
                self._eos = criterion
            elif type(criterion) not in (MaxLengthCriteria, MaxTimeCriteria):
                self._replayed.append(criterion)

    def __call__(self, input_ids: torch.Tensor, scores: tuple | None, **kwargs: Any) -> torch.Tensor:
        start, length = self._tested, input_ids.shape[1]
        self._tested = length
        limit = self._limit(start, length)
        stop = None if limit is None else limit
        for end in range(start + 1, (stop or length) + 1) if self._replayed else ():
            so_far = None if scores is None else scores[: end - self._prompt_length]
            results = [c(input_ids[:, :end], so_far, **kwargs) for c in self._replayed]
            if any(bool(torch.as_tensor(result).all()) for result in results):
                stop = end
                break
        if self._streamer is not None:
            self._streamer.release((stop or length) - start)
        if stop is not None and stop < length:
            self.cut = stop
        done = torch.full((input_ids.shape[0],), stop is not None, device=input_ids.device, dtype=torch.bool)
        if stop is None and self._eos is not None:
            done = done | self._eos(input_ids, scores, **kwargs)
        return done

    def _limit(self, start: int, length: int) -> int | None:
        """The first length in (start, length] at which a length or time criterion stops; None if none does."""
        limits = []
        for criterion in self:
            if type(criterion) is MaxLengthCriteria and length >= criterion.max_length:
                limits.append(max(criterion.max_length, start + 1))
            elif type(criterion) is MaxTimeCriteria:
                if time.time() - criterion.initial_timestamp > criterion.max_time:
                    limits.append(start + 1)
        return min(limits, default=None)


class CropRecorder:
    """
    Postpones the loop's crop of a sliding-window cache, so that it can grow before it is carried out.

    A sliding layer drops rows that left its window when it is cropped, so a second crop after one pass would find too
    few. The loop crops after every pass, and the end of the call may have to take back more.
    """

    def __init__(self, cache: Any):
        self._cache = cache
        self._pending: int | None = None
        self._recorded = [(layer, layer.record_past) for layer in cache.layers if hasattr(layer, "record_past")]
        cache.crop = self._record

    def _record(self, tokens_to_remove: int) -> None:
        self._pending = (self._pending or 0) + abs(int(tokens_to_remove))

    def flush(self, more: int = 0) -> None:
        """Carries out the recorded crop, with `more` rows on top."""
        if self._pending is not None:
            type(self._cache).crop(self._cache, -(self._pending + more))
            self._pending = None

    def restore(self) -> None:
        """Gives the cache its own `crop` back, and its layers their own way of forgetting."""
        self.flush()
        self._cache.__dict__.pop("crop", None)
        for layer, record_past in self._recorded:
            layer.record_past = record_past


class EagerCrop:
    """The same interface for caches that may be cropped twice after one pass: the loop's crops happen at once."""

    def __init__(self, cache: Any):
        self._cache = cache

    def flush(self, more: int = 0) -> None:
        """Takes back `more` rows; the loop has done its own."""
        if more:
            self._cache.crop(-more)

    def restore(self) -> None:
        """Nothing was replaced."""


def trim_output(result: Any, prompt_length: int, cut: int) -> Any:
    """Cuts what generate() returns to `cut` tokens, prompt included: ids, or the output object field by field."""
    if isinstance(result, torch.Tensor):
        return result[:, :cut]
    result.sequences = result.sequences[:, :cut]
    for name in ("scores", "logits", "attentions", "hidden_states"):
        steps = getattr(result, name, None)
        if steps is not None:
            setattr(result, name, steps[: cut - prompt_length])
    return result
