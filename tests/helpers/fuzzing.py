"""One case of the fuzzer: the calls that it amounts to, plain and drafted, and what must be the same."""

import functools
from collections import Counter
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from drafter_cases import redraw
from dspine_hf import DSpineDraftModel
from dspine_hf.compat_dspine import is_sliding
from helpers.families import family_target
from helpers.laws import chi_square_p
from helpers.oracle import oracle_for, prompt

DRAWS = 150
LONGEST = 96  # rows of a static cache


@functools.cache
def target_of(family: str, seed: int):
    return family_target(family, seed)


class Broken(Exception):
    """Raised by a criterion, a streamer or a processor, as an interruption."""


class Recorder(BaseStreamer):
    """Keeps what it is given; breaks at one of its tokens, if asked to."""

    def __init__(self, breaks_at: int | None):
        self.tokens: list[int] = []
        self.breaks_at, self.prompt, self.ended = breaks_at, True, False

    def put(self, value):
        if self.prompt:
            self.prompt = False
            return
        self.tokens += value.tolist()
        if self.breaks_at is not None and len(self.tokens) > self.breaks_at:
            raise Broken

    def end(self):
        self.ended = True


class Breaking(LogitsProcessor):
    """Changes nothing, and breaks at a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, ids, scores):
        if ids.shape[1] >= self.length:
            raise Broken
        return scores


def criteria(case: dict, length: int, text: list[int], breaks: bool) -> dict[str, Any]:
    """The stopping criteria of a case for a prompt of `length` tokens."""
    at = length + case["stop_at"]
    token = text[min(at, len(text) - 1)]

    def stop(ids, scores, **_):
        hit = {
            "length": ids.shape[1] >= at,
            "token": int(ids[0, -1]) == token,
            "scores": scores is not None and len(scores) >= case["stop_at"] and int(scores[-1].argmax()) % 2 == 0,
        }
        return torch.full((1,), hit[case["stop"]])

    def interrupt(ids, scores, **_):
        if ids.shape[1] > length + case["interrupt_at"]:
            raise Broken
        return torch.zeros(1, dtype=torch.bool)

    found = [stop] if case["stop"] else []
    found += [interrupt] if breaks and case["interrupt"] == "criterion" else []
    return {"stopping_criteria": StoppingCriteriaList(found)} if found else {}


def drafter_of(case: dict, target, text: torch.Tensor):
    """The drafter of a case: an oracle, or random weights."""
    spec = dict(case["drafter"])
    miss_every, limit = spec.pop("miss_every"), spec.pop("num_assistant_tokens")
    if miss_every:
        drafter = oracle_for(target, text, miss_every, **spec)
    else:
        torch.manual_seed(0)
        made = DSpineDraftModel.for_target(target, transfer_rank=6, intermediate_size=16, **spec)
        drafter = redraw(made, 3)
    drafter.generation_config.num_assistant_tokens = limit
    return drafter


class Side:
    """One of the two ways of generating: plain, or with the drafter; with a cache of its own."""

    def __init__(self, case: dict, target, drafter=None):
        self.case, self.target, self.drafter = case, target, drafter
        self.cache: Any = None
        if case["cache"] == "dynamic":
            self.cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        elif case["cache"] == "static":
            self.cache = StaticCache(config=target.config.get_text_config(decoder=True), max_cache_len=LONGEST)

    def call(self, ids, options: dict, breaks: bool = False):
        """(result or None after an interruption, the streamer or None, passes of the target)."""
        case, options, passes = self.case, dict(options), []
        if self.cache is not None:
            options["past_key_values"] = self.cache
        elif case["cache"] == "static by name":
            options["cache_implementation"] = "static"
        if breaks and case["interrupt"] == "processor":
            options["logits_processor"] = LogitsProcessorList([Breaking(ids.shape[1] + case["interrupt_at"])])
        if case["streamer"] or breaks and case["interrupt"] == "streamer":
            options["streamer"] = Recorder(
                case["interrupt_at"] if breaks and case["interrupt"] == "streamer" else None
            )
        if self.drafter is not None:
            options |= {"assistant_model": self.drafter, "do_sample": case["sample"] != "no"}
            options |= {"top_k": 1} if case["sample"] == "one" else {}
            options |= case["warpers"] if case["sample"] == "free" else {}
        hook = self.target.register_forward_pre_hook(lambda *_: passes.append(1))
        try:
            return self.target.generate(ids, **options), options.get("streamer"), len(passes)
        except Broken:
            return None, options.get("streamer"), len(passes)
        finally:
            hook.remove()
            assert "crop" not in vars(self.cache or object) or self.cache is None, "the cache keeps a crop of ours"

    def cut(self, length: int) -> None:
        """Take the cache back to `length` rows."""
        surplus = int(self.cache.get_seq_length()) - length
        if surplus > 0:
            self.cache.crop(-surplus)


def check(case: dict) -> Counter:
    """Assert that drafted and plain agree in this case; what it was about, for the statistics."""
    torch.manual_seed(0)
    target = target_of(case["family"], case["target_seed"])
    ids, padding = prompt(*case["prompt"]), case["padding"]
    text = target.generate(ids, max_new_tokens=36, do_sample=False, use_cache=True)[0]
    drafter = drafter_of(case, target, text)
    if case["sample"] == "law":
        check_law(target, ids, drafter, case["warpers"])
        return Counter(["cases", "law"])
    if padding:
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
    try:
        sides = Side(case, target), Side(case, target, drafter)
        return conversation(case, sides, ids, text) + Counter(["cases"])
    except (ValueError, NotImplementedError) as error:
        if refused_alike(error):
            return Counter(["cases", "refused"])
        raise


def refused_alike(error: Exception) -> bool:
    """Whether plain generation refused the arguments, or the drafter a static cache of a sliding window."""
    return getattr(error, "of_plain", False) or "static sliding-window cache" in str(error)


def conversation(case: dict, sides: tuple[Side, Side], ids, text) -> Counter:
    """The first call and the turns after it."""
    plain_side, drafted_side = sides
    seen = Counter([f"sample {case['sample']}", f"cache {case['cache']}"])
    ends = [int(text[min(ids.shape[1] + place, len(text) - 1)]) for place in case["eos"]]
    several = case["cache"] in ("dynamic", "static") and not case["padding"] and case["sample"] != "free"
    for turn in [None, *(case["turns"] if several else ())]:
        options: dict[str, Any] = {}
        if turn is not None:
            ids = next_turn(turn, sides, ids, seen)
            past = int(plain_side.cache.get_seq_length())
            if not turn["full_ids"]:
                options["attention_mask"] = torch.ones(1, ids.shape[1], dtype=torch.long)
        elif case["padding"]:
            options["attention_mask"] = (torch.arange(ids.shape[1]) >= case["padding"]).long()[None]
        given = ids if turn is None or turn["full_ids"] else ids[:, past:]
        found = one_call(case, sides, given, text, {**options, **base_options(case, ends)}, seen)
        if found is None:
            break
        ids = torch.cat([ids[:, : ids.shape[1] - given.shape[1]], found], dim=1)
    return seen


def base_options(case: dict, ends: list[int]) -> dict[str, Any]:
    return {
        "eos_token_id": ends or None,
        "pad_token_id": 0,
        "use_cache": True,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": case["states"],
        "max_new_tokens": case["new_tokens"],
        **case["processors"],
    }


def next_turn(turn: dict, sides: tuple[Side, Side], ids, seen: Counter):
    """What happens to both caches between two calls; the ids of the next one."""
    before = turn["before"]
    if before in ("crop", "refill") and is_sliding(sides[0].cache):
        before = None
    seen[f"turn {before}"] += 1
    cached = int(sides[0].cache.get_seq_length())
    if before in ("crop", "refill"):
        length = max(1, cached - turn["by"])
        for side in sides:
            side.cut(length)
        ids = ids[:, :length]
    if before in ("plain", "refill"):  # a turn without the drafter, on both caches
        ids = torch.cat([ids, prompt(1, turn["by"])], dim=1)
        rooms = {"max_new_tokens": turn["by"], "do_sample": False, "use_cache": True}
        found = [side.target.generate(ids, past_key_values=side.cache, **rooms) for side in sides]
        assert torch.equal(*found), "a plain turn over the drafted cache has another text"
        ids = found[0]
    return torch.cat([ids, prompt(turn["new"], 7)], dim=1)


def one_call(case: dict, sides: tuple[Side, Side], ids, text, options: dict, seen: Counter):
    """Plain and drafted; after an interruption once more without it. The text, or None if it was a free sample."""
    starts = [0 if side.cache is None else int(side.cache.get_seq_length()) for side in sides]
    for breaks in (True, False) if case["interrupt"] else (False,):
        options |= criteria(case, ids.shape[1], text.tolist(), breaks) or {"stopping_criteria": None}
        try:
            plain, plain_stream, _ = sides[0].call(ids, options, breaks)
        except (ValueError, NotImplementedError, IndexError) as error:
            error.of_plain = True
            raise
        drafted, stream, passes = sides[1].call(ids, options, breaks)
        if case["sample"] == "free":
            check_free(drafted, ids, case, options["eos_token_id"] or [])
            return None
        # A processor also sees drafts, so that it may break where plain generation ends before.
        if case["interrupt"] != "processor" or not breaks:
            assert (plain is None) == (drafted is None), "an interruption came in one of the two only"
        if plain is not None and drafted is not None:
            compare(plain, drafted, ids.shape[1], sides[1].drafter.generation_stats, passes, case)
            if plain_stream is not None:
                assert stream.tokens == plain_stream.tokens and stream.ended, "another stream"
            return plain.sequences
        seen["interrupted"] += 1
        if sides[0].cache is not None and is_sliding(sides[0].cache):
            return None  # rows that left the window do not come back
        for side, start in zip(sides, starts, strict=True):
            if side.cache is not None and start:
                side.cut(start)
            elif side.cache is not None:
                side.cache.reset() if case["cache"] == "static" else side.cut(0)
    raise AssertionError("a call without interruption was interrupted")


def check_free(drafted, ids, case: dict, ends: list[int]) -> None:
    if drafted is None:
        return
    new = drafted.sequences[0, ids.shape[1] :].tolist()
    assert 1 <= len(new) <= case["new_tokens"], "too many or too few tokens"
    assert all(0 <= token < 61 for token in new), "a token outside the vocabulary"
    assert not any(token in ends for token in new[:-1]), "text goes on behind its end"


def compare(plain, drafted, prompt_length: int, stats, passes: int, case: dict) -> None:
    assert plain.sequences.tolist() == drafted.sequences.tolist(), "another text"
    for name in ("scores", "logits") if case["sample"] == "no" else ("logits",):
        ours, theirs = drafted[name], plain[name]
        assert len(ours) == len(theirs), f"another number of {name}"
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    if case["states"]:
        assert len(plain.hidden_states) == len(drafted.hidden_states), "another number of hidden states"
        for one, other in zip(plain.hidden_states, drafted.hidden_states, strict=True):
            torch.testing.assert_close(one[-1][:, -1], other[-1][:, -1], rtol=1e-3, atol=1e-3)
    new_tokens = plain.sequences.shape[1] - prompt_length
    assert stats.new_tokens == new_tokens, f"stats count {stats.new_tokens} tokens of {new_tokens}"
    assert stats.rounds + 1 == passes, f"stats count {stats.rounds} rounds in {passes} passes"
    assert 0 <= stats.accepted <= stats.drafted and stats.accepted < max(1, new_tokens), f"inconsistent {stats}"
    assert new_tokens <= 1 + stats.accepted + stats.rounds, f"tokens from nowhere: {stats}"
    hits = [round(rate * n) for rate, n in zip(stats.slot_acceptance, stats.slot_trials, strict=True)]
    assert sum(hits) == stats.accepted and sum(stats.slot_trials) <= stats.drafted, f"inconsistent {stats}"
    assert all(a >= b for a, b in zip(hits, stats.slot_trials[1:], strict=False)), f"a slot before its turn: {stats}"
    assert len(stats.round_starts) == stats.rounds and list(stats.round_starts) == sorted(set(stats.round_starts))


def warper_list(options: dict) -> LogitsProcessorList:
    """The processors of these arguments, in generate()'s order."""
    kinds = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
    }
    return LogitsProcessorList([kind(options[name]) for name, kind in kinds.items() if options.get(name)])


def check_law(target, ids, drafter, options: dict) -> None:
    """The first two sampled tokens against their exact law."""
    warpers = warper_list(options)
    with torch.no_grad():
        first = warpers(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]
        starts = first.nonzero()[:, 0]
        rows = torch.cat([ids.expand(len(starts), -1), starts[:, None]], dim=1)
        second = warpers(rows, target(rows).logits[:, -1].float()).softmax(-1)
    law = {
        (int(a), b): float(first[a] * p) for a, row in zip(starts, second, strict=True) for b, p in enumerate(row) if p
    }
    counts: Counter[tuple[int, int]] = Counter()
    sampling = {"do_sample": True, "top_k": 0, **options, "use_cache": True}
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        out = target.generate(ids, assistant_model=drafter, max_new_tokens=3, **sampling)
        counts[tuple(out[0, ids.shape[1] : ids.shape[1] + 2].tolist())] += 1
    p = chi_square_p(counts, law, DRAWS)
    assert p > 1e-6, f"sampled pairs differ from the target's law: p = {p:.2g}"
