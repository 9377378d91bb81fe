"""Acceptance length, acceptance by slot, and speed-up: measured in generate(), or exactly offline at T = 0."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .bootstrap import interval
from .features import TargetReader
from .objective import block_states
from .offline import greedy_record, has_own_pass, loop_tail_start, offline_drafts
from .responses import end_ids
from .seeds import hash_seed

Record = dict[str, Any]


@dataclass
class Timed:
    """One generate() call: new tokens, seconds, and the drafter's statistics if it had a drafter."""

    tokens: list[int]
    seconds: float
    stats: Any = None


@dataclass
class Evaluator:
    """Measures one drafter on prompts of its target.

    Args:
        target, drafter: the pair, on the device and in the dtype to measure.
        max_new_tokens: length limit of each answer.
        seed: of the sampling at T > 0.
        teacher_forced: at T = 0, also run the drafter from every token of the answer with the true predecessors.
    """

    target: Any
    drafter: Any
    max_new_tokens: int = 256
    seed: int = 0
    teacher_forced: bool = True
    reader: TargetReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = TargetReader(self.target, self.drafter.config.target_layer_ids)

    def loop(self, prompt: list[int], temperature: float, seed: int = 0, drafted_first: bool = False) -> Record:
        """One prompt answered plain and with the drafter, by generate(), in the order asked for."""
        calls = {}
        for drafted in (drafted_first, not drafted_first):
            torch.manual_seed(hash_seed(self.seed, seed))
            calls[drafted] = self.timed(prompt, temperature, drafted)
        plain, drafted_call = calls[False], calls[True]
        stats = drafted_call.stats
        unused = [0] * (self.drafter.config.num_draft_slots - len(stats.slot_trials))
        hits = [round(p * n) for p, n in zip(stats.slot_acceptance, stats.slot_trials, strict=True)]
        tail = loop_tail_start(drafted_call.tokens)
        record = {
            "prompt_tokens": len(prompt),
            "new_tokens": stats.new_tokens,
            "rounds": stats.rounds,
            "trials": [*stats.slot_trials, *unused],
            "hits": hits + unused,
            "loop_start": tail,
            "clean_tokens": stats.new_tokens if tail is None else max(1, tail),
            "clean_rounds": stats.rounds if tail is None else sum(start < tail for start in stats.round_starts),
            "plain_tokens": len(plain.tokens),
            "plain_seconds": plain.seconds,
            "drafted_seconds": drafted_call.seconds,
        }
        if temperature == 0:
            record["identical"] = plain.tokens == drafted_call.tokens
            if self.teacher_forced:
                record |= self.forced(prompt, drafted_call.tokens)
        return record

    @torch.inference_mode()
    def timed(self, prompt: list[int], temperature: float, drafted: bool, max_new_tokens: int | None = None) -> Timed:
        """One call of generate(), timed from the call to the last token, prefill included."""
        ids = torch.tensor([prompt], device=self.target.get_input_embeddings().weight.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if drafted:
            sampling["assistant_model"] = self.drafter
        ends = end_ids(self.target)
        start = time.perf_counter()
        out = self.target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            pad_token_id=ends[0] if ends else 0,
            **sampling,
        )
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        seconds = time.perf_counter() - start
        return Timed(out[0, len(prompt) :].tolist(), seconds, self.drafter.generation_stats if drafted else None)

    def warm_up(self, prompt: list[int]) -> None:
        """Two short calls of each kind: the first ones pay for allocations and kernel choice."""
        for drafted in (False, True, False, True):
            self.timed(prompt, 0.0, drafted, max_new_tokens=8)

    @torch.inference_mode()
    def offline(self, prompt: list[int], continuation: list[int]) -> Record:
        """The figures of [`Evaluator.loop`] at T = 0, times aside, from one pass over the target's greedy text."""
        tokens, features, view = self._read(prompt, continuation)
        drafts = offline_drafts(self.drafter, view, features, tokens, len(prompt))
        stopped = bool(continuation) and continuation[-1] in end_ids(self.target)
        record = {"prompt_tokens": len(prompt), **greedy_record(drafts, continuation, stopped)}
        if self.teacher_forced:
            record |= self.forced(prompt, continuation, (tokens, features, view))
        return record

    @torch.inference_mode()
    def forced(self, prompt: list[int], continuation: list[int], read: Any = None) -> Record:
        """How often each slot's best token is the true one, given the true predecessor, over all anchors.

        Drafters with a pass of their own are measured by their greedy drafts alone: no figures.
        """
        if has_own_pass(self.drafter) or len(continuation) < 2:
            return {}
        tokens, features, view = read or self._read(prompt, continuation)
        slots = self.drafter.config.num_draft_slots
        anchors = torch.arange(len(prompt), tokens.shape[0] - 1, device=tokens.device)
        trials, hits = torch.zeros(slots), torch.zeros(slots)
        for part in anchors.split(128):
            places = part.unsqueeze(1) + torch.arange(slots + 1, device=part.device)  # [blocks, B]
            window = tokens[places.clamp_max(tokens.shape[0] - 1)]
            states = block_states(self.drafter, view, features, part[None], window[None, :, :-1])
            best = view.logits(states.unary).argmax(-1).view(-1, slots)
            if states.conditional is not None:
                given = view.logits(states.conditional).argmax(-1).view(-1, slots)
                best = torch.cat([best[:, :1], given[:, 1:]], dim=1)
            valid = places[:, 1:] < tokens.shape[0]
            trials += valid.sum(0).cpu()
            hits += (valid & (best == window[:, 1:])).sum(0).cpu()
        return {"forced_trials": trials.int().tolist(), "forced_hits": hits.int().tolist()}

    def _read(self, prompt: list[int], continuation: list[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        device = self.drafter.fc.weight.device
        tokens = torch.tensor([*prompt, *continuation], device=device)
        features, _ = self.reader(tokens[None])
        return tokens, features, self.drafter.bind_target(self.target)


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """The figures of one temperature: per benchmark, and the mean over benchmarks.

    A benchmark's acceptance length is all its new tokens (but each prompt's first) over all its verification passes.
    """
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record["benchmark"], []).append(record)
    benchmarks = {name: summarise_benchmark(rows) for name, rows in by_name.items()}
    result: dict[str, Any] = {"benchmarks": benchmarks}
    for name in ("acceptance_length", "acceptance_length_without_loops", "speedup"):
        values = [b[name] for b in benchmarks.values() if b.get(name) is not None]
        if values:
            result[f"mean_{name}"] = round(sum(values) / len(values), 4)
    everything = [row for rows in by_name.values() for row in rows]
    result["slot_acceptance"] = _rates(everything, "hits", "trials")
    if forced := _rates(everything, "forced_hits", "forced_trials"):
        result["slot_accuracy_teacher_forced"] = forced
    return result


def summarise_benchmark(rows: list[Record]) -> dict[str, Any]:
    """The figures of one prompt set."""
    pairs = [(row["new_tokens"] - 1, row["rounds"]) for row in rows]
    low, high = interval(pairs)
    result: dict[str, Any] = {
        "acceptance_length": _ratio(pairs),
        "acceptance_length_interval": [low, high],
        "acceptance_length_without_loops": _ratio([(row["clean_tokens"] - 1, row["clean_rounds"]) for row in rows]),
        "slot_acceptance": _rates(rows, "hits", "trials"),
        "prompts": len(rows),
        "loops": sum(row["loop_start"] is not None for row in rows),
        "new_tokens": sum(row["new_tokens"] for row in rows),
        "rounds": sum(row["rounds"] for row in rows),
    }
    if forced := _rates(rows, "forced_hits", "forced_trials"):
        result["slot_accuracy_teacher_forced"] = forced
    if "plain_seconds" in rows[0]:
        plain = sum(row["plain_tokens"] for row in rows) / sum(row["plain_seconds"] for row in rows)
        drafted = sum(row["new_tokens"] for row in rows) / sum(row["drafted_seconds"] for row in rows)
        result |= {
            "speedup": round(drafted / plain, 4),
            "tokens_per_second_plain": round(plain, 2),
            "tokens_per_second_drafted": round(drafted, 2),
        }
    if "identical" in rows[0]:
        result["identical"] = round(sum(row["identical"] for row in rows) / len(rows), 4)
    return result


def _ratio(pairs: list[tuple[int, int]]) -> float:
    tokens, rounds = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    return round(tokens / rounds, 4) if rounds else 1.0


def _rates(rows: list[Record], hits: str, trials: str) -> list[float]:
    slots = max((len(row.get(trials, ())) for row in rows), default=0)
    sums = [
        [sum(row[name][slot] for row in rows if slot < len(row.get(name, ()))) for slot in range(slots)]
        for name in (hits, trials)
    ]
    return [round(h / t, 4) if t else 0.0 for h, t in zip(*sums, strict=True)]
