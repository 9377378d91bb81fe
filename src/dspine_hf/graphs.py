"""CUDA graphs of the two halves of a round, kept from one call to the next.

A graph replays kernels on fixed addresses. So the batch's state, the caches and the drafts live in tensors that stay:
a [`Kept`] entry holds them between calls, without the models, which may be freed in the meantime.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from .fast_round import Rounds
from .fast_walk import Chain
from .static_cache import column_bucket
from .target_dspine import slots_within_positions, table_of

WARM_UPS = 2
CAPACITY_STEP = 256
ENTRIES_PER_TARGET = 2
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of peft's layers

_KEPT: "weakref.WeakKeyDictionary[Any, dict[Any, Kept]]" = weakref.WeakKeyDictionary()
_UNCAPTURABLE: "weakref.WeakSet[Any]" = weakref.WeakSet()
_LOCK = threading.Lock()
_STREAMS = threading.local()  # that graphs are captured on: one for each thread and device


class CaptureFailed(RuntimeError):
    """A pass could not be captured as a CUDA graph."""


@dataclass
class Recording:
    """One captured function: what replays it, and what it returned."""

    replay: Callable[[], None]
    result: Any


def record(run: Callable[[], Any], pool: Any) -> Recording:
    """
    Captures `run` as a CUDA graph after running it on a side stream, as torch asks for.

    cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has run on, and a graph writes to the one of
    its capture. Without workspaces before, a capture makes its own in the pool; without it afterwards, the pool's next
    capture takes it over. So the graphs of one pool share one workspace, and share none with other pools' graphs,
    which other threads may replay at the same time.
    """
    current = torch.cuda.current_stream()
    streams = vars(_STREAMS)
    if current.device not in streams:
        streams[current.device] = torch.cuda.Stream(current.device)
    stream = streams[current.device]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    _forget_workspaces()
    try:
        with torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):  # other threads go on
            result = run()
    finally:
        _forget_workspaces()
    return Recording(graph.replay, result)


def _forget_workspaces() -> None:
    """Gives the workspaces of cuBLAS back to where they were allocated; it makes new ones when it needs them."""
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None and torch.__version__ >= "2.10":  # before, other threads could be looking for theirs
        forget()


@dataclass
class Kept:
    """
    What outlives a call: the device's state and the graphs over it.

    Attributes:
        rounds: the device's half of the call.
        recordings: by what they run and over how many columns.
        pool: the memory that the graphs share.
        left: the event behind all that the last call gave the device to do; None: that was a CPU.
    """

    rounds: Rounds
    recordings: dict[tuple, Recording] = field(default_factory=dict)
    pool: Any = None
    left: Any = None
    captures: ClassVar[int] = 0  # of this process, for measurements

    def cleared(self) -> Rounds:
        """The state with empty caches: what no mask shows counts for nothing only while it is finite."""
        self.rounds.passes.cache.clear()
        if self.rounds.context is not None:
            self.rounds.context.clear()
        return self.rounds


class GraphedRounds:
    """
    Runs the halves of a round as graphs.

    Args:
        kept: the state, with its models in place.
        processors: the call's processors, all of them fast; they are part of the graphs.
        recorder: captures a function; another one is for tests.
    """

    def __init__(self, kept: Kept, processors: list[Any], recorder: Callable[..., Recording] = record):
        self._kept, self._processors, self._recorder = kept, processors, recorder
        self.rounds = kept.rounds
        self._columns = 0

    def recorded(self, drafts: int, used: int) -> bool:
        """Whether a round that verifies so many drafts is there already, and need not be captured."""
        columns = self._bucket(used)
        keys = [("verify", drafts, columns), *([("draft", columns)] if drafts else [])]
        return all(key in self._kept.recordings for key in keys)

    def draft(self, used: int) -> Chain:
        """Drafts and walks; `used` bounds the columns in use from above."""
        self._columns = self._bucket(used)
        self.rounds.chain = self._run(("draft",), self._chain)
        assert self.rounds.chain is not None
        return self.rounds.chain

    def _chain(self) -> Chain | None:
        self.rounds.draft(self._processors, self._columns, None)
        return self.rounds.chain

    def verify(self, drafts: int, used: int) -> torch.Tensor:
        """Verifies the first `drafts` tokens of the last draft; see [`Rounds.append`] for what it returns."""
        if drafts:  # over the columns of the draft, which lies where its graph wrote it
            columns = self._columns
        else:
            columns = self._columns = self._bucket(used)
        report = self._run(("verify", drafts), lambda: self.rounds.verify(1 + drafts, self._processors, columns, None))
        return report.clone()  # graphs share memory: the next one may write where this one put its result

    def _bucket(self, used: int) -> int:
        """How many columns a graph looks at; all where attention is fused, which reads those that a row sees alone."""
        rounds = self.rounds
        fused = rounds.passes.fused and (rounds.context is None or rounds.attend is not None)
        capacity = rounds.passes.cache.capacity
        return capacity if fused else column_bucket(used, capacity)

    def _run(self, key: tuple, run: Callable[[], Any]) -> Any:
        key = (*key, self._columns)
        found = self._kept.recordings.get(key)
        if found is None:
            with frozen(self.rounds):
                if self._kept.pool is None and torch.cuda.is_available():
                    self._kept.pool = torch.cuda.graph_pool_handle()
                try:
                    found = self._recorder(run, self._kept.pool)
                except RuntimeError as error:
                    raise CaptureFailed(str(error)) from error
            self._kept.recordings[key] = found
            Kept.captures += 1
        found.replay()
        return found.result


@contextmanager
def frozen(rounds: Rounds) -> Iterator[None]:
    """While it lasts, rounds change no row: every row counts as done. Nothing else that they write is looked at."""
    rows = rounds.rows
    done = rows.done.clone()
    seen = None if rows.seen is None else rows.seen.table.clone()
    rows.done.fill_(True)
    try:
        yield
    finally:
        rows.done.copy_(done)
        if rows.seen is not None:
            rows.seen.table.copy_(seen)


def draft_lengths(slots: int) -> list[int]:
    """The numbers of drafts that graphs verify: 1, 3, 7, .. and the whole draft: passes of 2, 4, 8, .. rows."""
    lengths, length = [], 1
    while length < slots:
        lengths.append(length)
        length = 2 * length + 1
    return [*lengths, slots] if slots else []


def signature(processors: list[Any]) -> tuple | None:
    """What processors put into a graph; None when one of them holds more than plain values."""
    parts = []
    for processor in processors:
        # Which tokens a penalty counts is in the batch's state.
        values = tuple(sorted((k, v) for k, v in vars(processor).items() if k != "prompt_ignore_length"))
        if any(not isinstance(value, (int, float, bool, str, type(None))) for _, value in values):
            return None
        parts.append((type(processor).__name__, values))
    return tuple(parts)


def state_of(*models: Any) -> int:
    """
    A number that changes with what a graph of these models has taken in beside the values of their weights: where
    these lie, the plain values of the configs, training or not, and which adapters of peft run, how strongly.
    """
    parts: list[Any] = []
    for model in (model for model in models if model is not None):
        config = model.config.get_text_config(decoder=True)
        values = {name: value for name, value in vars(config).items() if not name.startswith("_attn")}  # borrowed
        parts += [model.training, *(f"{name}={value!r}" for name, value in values.items())]
        parts += [(tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers())]
        for module in model.modules():
            found = vars(module)
            parts += [repr(found[name]) for name in _OF_ADAPTERS if name in found]
        table = table_of(model)
        parts += [] if table is None else [table.data_ptr()]
    return hash(tuple(parts))


def can_record(target: Any) -> bool:
    """Whether the target's passes may be captured: one CUDA device, no rotary table that is chosen on the host."""
    devices = {parameter.device for parameter in target.parameters()}
    text = target.config.get_text_config(decoder=True)
    on_host = bool(getattr(text, "rope_parameters", None)) and slots_within_positions(text, 0) is not None
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and not on_host


def is_uncapturable(target: Any) -> bool:
    """Whether capturing this target has failed before."""
    return target in _UNCAPTURABLE


def take(target: Any, key: Any, capacity: int) -> Kept | None:
    """What an earlier call kept under `key`, if it holds `capacity` columns; the caller's until it is put back."""
    with _LOCK:
        found = _KEPT.get(target, {}).pop(key, None)
    if found is None or found.rounds.passes.cache.capacity < capacity:
        return None
    if found.left is not None:  # the last call may have run on another stream
        torch.cuda.current_stream(found.rounds.rows.length.device).wait_event(found.left)
    return found


def cache_bytes(target: Any) -> int:
    """Bytes of the static caches, the target's and the drafter's, that calls with this target keep."""
    total = 0
    for kept in list(_KEPT.get(target, {}).values()):
        stores = [layer.rows for layer in kept.rounds.passes.cache.layers]
        stores += [] if kept.rounds.context is None else kept.rounds.context.layers
        total += sum(t.nbytes for rows in stores for t in (rows.keys, rows.values) if t is not None)
    return total


def keep(target: Any, key: Any, kept: Kept) -> None:
    """Keeps a call's state and graphs for the next; of a target's entries only the latest stay."""
    kept.rounds.detach()
    device = kept.rounds.rows.length.device
    if device.type == "cuda":
        kept.left = torch.cuda.current_stream(device).record_event()
    with _LOCK:
        entries = _KEPT.setdefault(target, {})
        entries[key] = kept
        while len(entries) > ENTRIES_PER_TARGET:
            entries.pop(next(iter(entries)))


def release(target: Any) -> None:
    """Frees what calls with this target kept: caches and graphs."""
    with _LOCK:
        _KEPT.pop(target, None)


def go_on_without(target: Any, error: Exception) -> None:
    """Says once that calls with this target run without graphs, and why."""
    _UNCAPTURABLE.add(target)
    warnings.warn(
        f"expected to capture CUDA graphs of this target; found: {str(error).splitlines()[0]} Going on without; pass "
        "use_graphs=False to skip the attempt.",
        stacklevel=2,
    )
