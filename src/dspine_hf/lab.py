"""Train several drafters on one target's features, held on the device, at equal steps and data; measure each."""

import collections
import glob
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .blocks import sample_anchors
from .journal import write_atomically
from .losses import LossWeights
from .modeling_dspine import DSpineDraftModel
from .muon import MuonAdamW
from .objective import SequenceBatch, block_states, training_loss
from .offline import greedy_record
from .offline_sampled import expected_record, expected_walk
from .offline_texts import texts_drafts, texts_log_p, texts_log_q


@dataclass
class Variant:
    """One drafter to train: its config overrides, loss and optimiser.

    kind: "dspine" or a name in `baselines.BASELINES`. space: "uniform" or "frequency" weighting of the transfer space.
    forcing: teacher-forcing probability at the start, falling to 0 over the first `forcing_until` of the steps.
    longest_prompt: leave out sequences with longer prompts.
    oracle: force every message to the true predecessor's, in training and evaluation: a bound, not a drafter.
    seconds: train for at most this long; the schedule is fitted to the steps that the first 100 suggest.
    start: folder of a trained drafter to go on from, with `config` in place of its own settings; None: afresh.
    With 0 steps it is measured as it is.
    """

    name: str
    kind: str = "dspine"
    config: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    steps: int = 3000
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    sequences: int = 32
    anchors: int = 48
    space: str = "uniform"
    forcing: float = 0.0
    forcing_until: float = 0.6
    oracle: bool = False
    longest_prompt: int | None = None
    seed: int = 0
    seconds: float | None = None
    start: str | None = None


def read_sequences(pattern: str, limit: int | None = None) -> list[tuple[np.ndarray, int]]:
    """(tokens, prompt_length) pairs of every npz file that matches `pattern`, the first `limit` of them."""
    sequences: list[tuple[np.ndarray, int]] = []
    for path in sorted(glob.glob(pattern)):
        with np.load(path) as arrays:
            tokens, lengths, prompts = (arrays[name] for name in ("tokens", "length", "prompt_length"))
        ends = lengths.astype(np.int64).cumsum()
        sequences += [(tokens[b - n : b], int(p)) for b, n, p in zip(ends, lengths, prompts, strict=True)]
    return sequences[:limit]


def write_sequences(path: Path, sequences: list[tuple[Any, int]], **columns: Any) -> None:
    """Writes (tokens, prompt_length) pairs for [`read_sequences`], whole or not at all; columns: more arrays."""
    tokens = np.concatenate([tokens for tokens, _ in sequences])
    arrays: dict[str, Any] = {
        "tokens": tokens.astype(np.uint16 if tokens.max() < 2**16 else np.uint32),
        "length": np.array([len(tokens) for tokens, _ in sequences], dtype=np.uint16),
        "prompt_length": np.array([prompt for _, prompt in sequences], dtype=np.uint16),
    }
    file = io.BytesIO()
    np.savez_compressed(file, **arrays, **columns)
    write_atomically(path, file.getvalue())


def read_continuations(path: str, field: str, per_set: int | None) -> tuple[list[tuple[np.ndarray, int]], list[str]]:
    """Sequences of prompt + continuation (`field`), at most `per_set` a benchmark, and the benchmark of each."""
    sequences, names = [], []
    seen: collections.Counter[str] = collections.Counter()
    with open(path) as lines:
        for row in map(json.loads, lines):
            seen[row["benchmark"]] += 1
            if (per_set is None or seen[row["benchmark"]] <= per_set) and len(row.get(field, ())) > 1:
                sequences.append((np.array(row["prompt_ids"] + row[field]), len(row["prompt_ids"])))
                names.append(row["benchmark"])
    return sequences, names


class FeatureStore:
    """Token sequences and the target's states for them, flat on one device.

    Args:
        model: the target. layer_ids: whose outputs to keep.
        sequences: (tokens, prompt_length) pairs; longer ones are cut to `max_length`.
    """

    def __init__(
        self, model: Any, layer_ids: list[int], sequences: Any, max_length: int = 448, batch_tokens: int = 65536
    ):
        self.model, self.layer_ids, self.max_length = model, layer_ids, max_length
        kept = [(np.asarray(t[:max_length]), p) for t, p in sequences if p < min(len(t), max_length) - 1]
        self.lengths = torch.tensor([len(t) for t, _ in kept], device=model.device)
        self.prompt_lengths = torch.tensor([p for _, p in kept], device=model.device)
        self.offsets = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])[:-1]
        flat = np.concatenate([t for t, _ in kept]).astype(np.int64)
        self.tokens = torch.from_numpy(flat).to(model.device)
        d = model.config.hidden_size
        rows = len(flat) + max_length
        self.features = torch.empty(rows, len(layer_ids) * d, dtype=model.dtype, device=model.device)
        self.final = torch.empty(rows, d, dtype=model.dtype, device=model.device)
        self.features[len(flat) :] = 0
        self.final[len(flat) :] = 0
        self._fill(batch_tokens)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @torch.no_grad()
    def _fill(self, batch_tokens: int) -> None:
        order = self.lengths.argsort().tolist()
        start = 0
        while start < len(order):
            longest = int(self.lengths[order[min(start + 255, len(order) - 1)]])
            part = order[start : start + max(1, min(256, batch_tokens // longest))]
            start += len(part)
            width = int(self.lengths[part].max())
            ids = torch.tensor(part, device=self.tokens.device)
            places = self.offsets[ids].unsqueeze(1) + torch.arange(width, device=ids.device)
            inside = torch.arange(width, device=ids.device) < self.lengths[ids].unsqueeze(1)
            tokens = self.tokens[places.clamp_max(self.tokens.shape[0] - 1)]
            states = self.model.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
            taps = torch.cat([states.hidden_states[i + 1] for i in self.layer_ids], dim=-1)
            self.features[places[inside]] = taps[inside]
            self.final[places[inside]] = states.last_hidden_state[inside]

    def batch(self, index: torch.Tensor, anchors: int, with_final: bool) -> SequenceBatch:
        """The sequences `index` [batch] as padded tensors of `max_length`, with fresh anchors."""
        places = self.offsets[index].unsqueeze(1) + torch.arange(self.max_length, device=index.device)
        lengths, prompts = self.lengths[index], self.prompt_lengths[index]
        return SequenceBatch(
            tokens=self.tokens[places.clamp_max(self.tokens.shape[0] - 1)],
            lengths=lengths,
            prompt_lengths=prompts,
            features=self.features[places],
            anchors=sample_anchors(prompts, lengths, anchors),
            final=self.final[places] if with_final else None,
        )

    def sequence(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence i: tokens [length], features [1, length, len(ids) * d], normed last states [1, length, d]."""
        part = slice(int(self.offsets[i]), int(self.offsets[i] + self.lengths[i]))
        return self.tokens[part], self.features[None, part], self.final[None, part]

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token occurs in the responses [vocab_size], fp64."""
        inside = torch.zeros_like(self.tokens, dtype=torch.bool)
        for offset, prompt, length in zip(
            self.offsets.tolist(), self.prompt_lengths.tolist(), self.lengths.tolist(), strict=True
        ):
            inside[offset + prompt : offset + length] = True
        return torch.bincount(self.tokens[inside], minlength=vocab_size).double()


def build_drafter(variant: Variant, model: Any, counts: torch.Tensor | None) -> DSpineDraftModel:
    """A drafter of the variant's kind in fp32 on the model's device, fresh unless it starts from a trained one."""
    torch.manual_seed(variant.seed)
    weights = counts if variant.space == "frequency" else None
    if variant.start is not None:
        if variant.kind != "dspine":
            raise ValueError(
                f'start="{variant.start}" is for kind="dspine"; found kind="{variant.kind}". Leave one of them out.'
            )
        drafter = DSpineDraftModel.from_pretrained(variant.start, **variant.config)
        drafter.check_target(model)
    elif variant.kind == "dspine":
        drafter = DSpineDraftModel.for_target(model, weights, **variant.config)
    else:
        from .baselines import BASELINES

        drafter = BASELINES[variant.kind](model, weights, **variant.config)
    return drafter.float().to(model.device)


def learning_rate_factor(step: int, steps: int, warmup: float = 0.04, floor: float = 0.01) -> float:
    """Linear warm-up, then cosine down to `floor`."""
    ramp = max(1, int(warmup * steps))
    if step < ramp:
        return (step + 1) / ramp
    progress = (step - ramp) / max(1, steps - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(drafter: DSpineDraftModel, variant: Variant) -> torch.optim.Optimizer:
    """The variant's optimiser over all trainable parameters."""
    if variant.optimizer == "muon":
        return MuonAdamW(drafter.named_parameters(), lr=variant.learning_rate, weight_decay=variant.weight_decay)
    decayed = [p for p in drafter.parameters() if p.ndim >= 2]
    plain = [p for p in drafter.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": variant.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    fused = next(drafter.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=variant.learning_rate, betas=(0.9, 0.95), fused=fused)


class GraphedPass:
    """A forward and backward pass as one CUDA graph, replayed for other sequences; gradients keep their places.

    Launching a pass kernel by kernel takes longer than the kernels do.

    Args:
        run: takes sequence numbers [n], runs both passes and returns the loss's parts; must not wait for the host.
        index: an example of its argument.
        model: whose gradients the pass writes.
    """

    def __init__(self, run: Callable[[torch.Tensor], dict[str, torch.Tensor]], index: torch.Tensor, model: Any):
        self.index = index.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, and lets libraries take their workspaces
                run(self.index)
                model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.parts = run(self.index)

    def __call__(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss's parts, valid until the next call."""
        self.index.copy_(index)
        self.graph.replay()
        return self.parts


def capture(run: Callable, index: torch.Tensor, model: Any, log: Callable[[str], None]) -> GraphedPass | None:
    """A [`GraphedPass`], or None, with a word to `log`, for a pass that cannot be captured."""
    try:
        return GraphedPass(run, index, model)
    except RuntimeError as error:
        log(f"no CUDA graph of this pass: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        return None


def train_variant(
    variant: Variant,
    model: Any,
    store: FeatureStore,
    counts: torch.Tensor,
    log_every: int = 250,
    log: Callable[[str], None] = print,
) -> tuple[DSpineDraftModel, dict[str, Any]]:
    """Train one variant on the store. Returns the drafter and its record (history, speed, memory)."""
    device = model.device
    drafter = build_drafter(variant, model, counts).train()
    view = drafter.bind_target(model)
    optimizer = make_optimizer(drafter, variant)
    weights = LossWeights(**variant.loss)
    cuda = device.type == "cuda"
    torch.compiler.reset()
    states_fn = torch.compile(block_states, dynamic=False) if cuda else block_states
    options = {"states_fn": states_fn, "compiled": cuda}

    def one_pass(index: torch.Tensor, forcing: float) -> dict[str, torch.Tensor]:
        batch = store.batch(index, variant.anchors, bool(weights.distill or weights.total_variation))
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            loss, parts = training_loss(drafter, view, batch, weights, **options, forcing_probability=forcing)
        loss.backward()
        return parts

    graphed = None
    if cuda and not variant.forcing and variant.steps:
        example = torch.arange(variant.sequences, device=device) % len(store)
        graphed = capture(lambda index: one_pass(index, float(variant.oracle)), example, drafter, log)
    generator = torch.Generator().manual_seed(variant.seed)
    history, total, steps = [], None, variant.steps
    order: list[int] = []
    usable = torch.arange(len(store))
    if variant.longest_prompt is not None:
        usable = usable[store.prompt_lengths.cpu() <= variant.longest_prompt]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started = warm = time.perf_counter()
    step = 0
    while step < steps:
        if len(order) < variant.sequences:
            order = usable[torch.randperm(len(usable), generator=generator)].tolist()
        index = torch.tensor(order[: variant.sequences], device=device)
        order = order[variant.sequences :]
        for group in optimizer.param_groups:
            group["lr"] = variant.learning_rate * learning_rate_factor(step, steps)
        forcing = 1.0 if variant.oracle else variant.forcing * max(0.0, 1 - step / (variant.forcing_until * steps))
        parts = one_pass(index, forcing) if graphed is None else graphed(index)
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if graphed is None:
            optimizer.zero_grad(set_to_none=True)
        total = {k: v.clone() if total is None else total[k] + v for k, v in parts.items()}
        step += 1
        if step == 20:
            warm = _now(cuda)
        if step == 100 and variant.seconds is not None:
            left = variant.seconds - (_now(cuda) - started)
            steps = min(steps, step + max(0, int(left * (step - 20) / (_now(cuda) - warm))))
        if step % log_every == 0 or step == steps:
            span = log_every if step % log_every == 0 else step % log_every
            entry = {"step": step, "seconds": round(_now(cuda) - started, 1), "gradient_norm": round(float(norm), 3)}
            entry |= {k: _rounded(v / span) for k, v in total.items()}
            history.append(entry)
            log(f"{variant.name}: {json.dumps(entry)}")
            total = None
    rate = (step - 20 if step > 20 else step) / max(1e-9, _now(cuda) - warm)  # the first steps warm up
    record = {
        "variant": asdict(variant),
        "steps": step,
        "steps_per_second": round(rate, 2),
        "blocks_per_second": round(rate * variant.sequences * variant.anchors, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "history": history,
    }
    return drafter.eval(), record


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _rounded(value: torch.Tensor) -> Any:
    flat = value.float().reshape(-1).tolist()
    return round(flat[0], 4) if len(flat) == 1 else [round(x, 4) for x in flat]


@torch.no_grad()
def evaluate_offline(
    drafter: DSpineDraftModel, model: Any, store: FeatureStore, names: list[str], sampled: bool = False, end: int = -1
) -> list[dict[str, Any]]:
    """Exact acceptance on the target's own continuations: one record per sequence, for `evaluation.summarise`.

    Args:
        store: features of prompt + continuation; names: the benchmark of each sequence.
        sampled: the continuations were sampled at T = 1 (expected acceptance), else greedy (T = 0).
        end: the token that ends a text; such a last token may be drafted.

    Raises:
        ValueError: there are not as many names as sequences.
    """
    if len(names) != len(store):
        raise ValueError(
            f"expected a name for each of the store's {len(store)} sequences; found {len(names)}. The store leaves "
            "out those whose prompt fills its max_length: raise it, or leave them out of the names too."
        )
    view, texts = drafter.bind_target(model), store.tokens.cpu().split(store.lengths.tolist())
    prompts, seen, rows = store.prompt_lengths.tolist(), dict.fromkeys(names, 0), []
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        found = texts_log_q(drafter, view, store) if sampled else texts_drafts(drafter, view, store)
        likely = texts_log_p(view, store) if sampled else found
    for name, tokens, prompt, drafted, log_p in zip(names, texts, prompts, found, likely, strict=True):
        text = tokens[prompt:].tolist()
        stopped = text[-1] == end
        if sampled:
            record = expected_record(expected_walk(drafted, log_p, stopped))
        else:
            record = greedy_record(drafted, text, stopped)
        rows.append({"benchmark": name, "index": seen[name], "prompt_tokens": prompt, **record})
        seen[name] += 1
    return rows
