"""Random targets, drafters and arguments of generate(), drafted against plain; prints a reproducer of what differs.

python tests/fuzz.py --cases 2000 --seed 0        fresh cases, shrunk where one fails
python tests/fuzz.py --case '{"family": ...}'     one case again
"""

import argparse
import functools
import json
import sys
import time

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafter_cases import redraw
from dspine_hf import DSpineDraftModel
from helpers.families import family_target
from helpers.laws import chi_square_p
from helpers.oracle import oracle_for, prompt

FAMILIES = (
    "Llama",
    "Mistral",
    "Qwen3",
    "Gemma2",
    "Gemma3Text",
    "GPT2",
    "Cohere2",
    "DeepseekV3",
    "GptOss",
    "Phi",
    "Falcon",
)
DRAWS = 150

switches = st.sampled_from(
    [
        {},
        {"injection_placement": "mlp"},
        {"rewrite_layers": 1},
        {"injection": "last"},
        {"injection": "none", "selection": "independent"},
        {"mask_token_id": 3},
        {"context_window": 4},
    ]
)
drafters = st.fixed_dictionaries(
    {
        "block_size": st.integers(2, 8),
        "num_candidates": st.integers(1, 8),
        "switches": switches,
        "miss_every": st.sampled_from([0, 1, 2, 3, 5, 1000]),  # 0: random weights
        "num_assistant_tokens": st.sampled_from([None, None, 1, 3]),
    }
)
processors = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, 8),
        "suppress_tokens": st.lists(st.integers(0, 60), min_size=1, max_size=4),
        "bad_words_ids": st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=2), min_size=1, max_size=3),
        "forced_eos_token_id": st.integers(0, 60),
    },
)
cases = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILIES),
        "target_seed": st.integers(0, 2),
        "drafter": drafters,
        "prompt": st.tuples(st.integers(1, 12), st.integers(0, 50)),  # length, seed
        "padding": st.sampled_from([0, 0, 0, 2]),
        "new_tokens": st.integers(1, 20),
        "processors": st.one_of(st.just({}), processors),
        "sample": st.sampled_from(["no", "no", "no", "one", "free", "law"] + ["no"] * 14),
        "eos": st.lists(st.integers(0, 20), max_size=2),  # places in the plain text
        "stop": st.sampled_from([None, None, "length", "token", "raise"]),
        "stop_at": st.integers(1, 15),
        "second_turn": st.sampled_from([0, 0, 3]),
        "states": st.booleans(),
    }
)


@functools.cache
def target_of(family: str, seed: int):
    return family_target(family, seed)


class Broken(Exception):
    """Raised by a criterion, as an interruption."""


def criterion(case: dict, prompt_length: int, text: list[int]):
    """A stopping criterion of the case's kind, or none."""
    at = prompt_length + case["stop_at"]
    token = text[min(at, len(text) - 1)]

    def stop(ids, scores, **_):
        if case["stop"] == "raise" and ids.shape[1] >= at:
            raise Broken
        hit = ids.shape[1] >= at if case["stop"] == "length" else int(ids[0, -1]) == token
        return torch.full((1,), hit and case["stop"] != "raise")

    return {"stopping_criteria": StoppingCriteriaList([stop])} if case["stop"] else {}


def drafter_of(case: dict, target, text: torch.Tensor):
    spec = case["drafter"]
    shapes = {"block_size": spec["block_size"], "num_candidates": spec["num_candidates"], **spec["switches"]}
    if spec["miss_every"]:
        drafter = oracle_for(target, text, spec["miss_every"], **shapes)
    else:
        torch.manual_seed(0)
        made = DSpineDraftModel.for_target(
            target, num_hidden_layers=2, transfer_rank=6, intermediate_size=16, **shapes
        )
        drafter = redraw(made, 3)
    drafter.generation_config.num_assistant_tokens = spec["num_assistant_tokens"]
    return drafter


def attempt(target, ids, options):
    """(result or None when a criterion raised, passes of the target)."""
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        return target.generate(ids, **options), len(passes)
    except Broken:
        return None, len(passes)
    finally:
        hook.remove()


def check_law(target, ids, drafter) -> None:
    """The first two sampled tokens against their exact law."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(6), TopPLogitsWarper(0.9)])
    with torch.no_grad():
        first = warpers(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]
        starts = first.nonzero()[:, 0]
        rows = torch.cat([ids.expand(len(starts), -1), starts[:, None]], dim=1)
        second = warpers(rows, target(rows).logits[:, -1].float()).softmax(-1)
    law = {
        (int(a), b): float(first[a] * p) for a, row in zip(starts, second, strict=True) for b, p in enumerate(row) if p
    }
    counts: dict[tuple[int, int], int] = {}
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        out = target.generate(
            ids, assistant_model=drafter, do_sample=True, temperature=0.8, top_k=6, top_p=0.9, max_new_tokens=3
        )
        pair = tuple(out[0, ids.shape[1] : ids.shape[1] + 2].tolist())
        counts[pair] = counts.get(pair, 0) + 1
    p = chi_square_p(counts, law, DRAWS)
    assert p > 1e-6, f"sampled pairs differ from the target's law: p = {p:.2g}"


def check(case: dict) -> None:
    """Assert that drafted and plain agree in this case."""
    torch.manual_seed(0)
    target = target_of(case["family"], case["target_seed"])
    ids, padding = prompt(*case["prompt"]), case["padding"]
    text = target.generate(ids, max_new_tokens=36, do_sample=False)[0]
    drafter = drafter_of(case, target, text)
    if case["sample"] == "law":
        return check_law(target, ids, drafter)
    ends = [int(text[min(ids.shape[1] + place, len(text) - 1)]) for place in case["eos"]]
    base = {"eos_token_id": ends or None, "pad_token_id": 0, "return_dict_in_generate": True, **case["processors"]}
    base |= {"output_scores": True, "output_hidden_states": case["states"]}
    if padding:
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
        base["attention_mask"] = (torch.arange(ids.shape[1]) >= padding).long()[None]
    base |= {"max_new_tokens": case["new_tokens"], **criterion(case, ids.shape[1], text.tolist())}
    caches = (DynamicCache(config=target.config), DynamicCache(config=target.config)) if case["second_turn"] else ()
    for turn in range(2 if case["second_turn"] and not padding else 1):
        plain_options, drafted_options = dict(base, do_sample=False), dict(base, assistant_model=drafter)
        drafted_options["do_sample"] = case["sample"] != "no"
        if case["sample"] == "one":
            drafted_options["top_k"] = 1
        if caches:
            plain_options["past_key_values"], drafted_options["past_key_values"] = caches
        try:
            plain, _ = attempt(target, ids, plain_options)
        except ValueError:
            return None  # contradictory arguments, refused without a drafter too
        drafted, passes = attempt(target, ids, drafted_options)
        if case["sample"] == "free":
            return check_free(drafted, ids, case, ends)
        assert (plain is None) == (drafted is None), "an interruption came in one of the two only"
        if plain is None:
            return None
        compare(plain, drafted, ids.shape[1], drafter.generation_stats, passes, scores=case["sample"] == "no")
        if turn == 0 and case["second_turn"]:
            ids = torch.cat([plain.sequences, prompt(case["second_turn"], 7)], dim=1)
    return None


def check_free(drafted, ids, case, ends) -> None:
    if drafted is None:
        return
    new = drafted.sequences[0, ids.shape[1] :].tolist()
    assert 1 <= len(new) <= case["new_tokens"], "too many or too few tokens"
    assert all(0 <= token < 61 for token in new), "a token outside the vocabulary"
    assert not any(token in ends for token in new[:-1]), "text goes on behind its end"


def compare(plain, drafted, prompt_length: int, stats, passes: int, scores: bool) -> None:
    assert plain.sequences.tolist() == drafted.sequences.tolist(), "another text"
    assert len(plain.scores) == len(drafted.scores), "another number of scores"
    for one, other in zip(plain.scores, drafted.scores, strict=True) if scores else ():
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    new_tokens = plain.sequences.shape[1] - prompt_length
    assert stats.new_tokens == new_tokens, f"stats count {stats.new_tokens} tokens of {new_tokens}"
    assert 0 <= stats.accepted <= stats.drafted and stats.accepted < max(1, new_tokens), f"inconsistent {stats}"
    assert stats.rounds + 1 == passes, f"stats count {stats.rounds} rounds in {passes} passes"


def fuzz(cases_wanted: int, seed: int, minutes: float | None = None) -> int:
    """Run cases; the number that ran clean. A failure is shrunk, printed and raised."""
    done, end, last = [], time.monotonic() + 60 * (minutes or 1e9), {}

    @hypothesis_seed(seed)
    @settings(
        max_examples=cases_wanted, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(cases)
    def run(case):
        if not last and time.monotonic() > end:
            return
        try:
            check(case)
        except Exception:
            last["case"] = case
            raise
        done.append(1)

    try:
        run()
    except BaseException:
        if last:
            print(f"\nReproduce with:\n  python tests/fuzz.py --case '{json.dumps(last['case'])}'", flush=True)
        raise
    return len(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="start no case after so long")
    parser.add_argument("--case", type=json.loads, help="run this case alone")
    arguments = parser.parse_args()
    if arguments.case:
        return check(arguments.case)
    start = time.monotonic()
    done = fuzz(arguments.cases, arguments.seed, arguments.minutes)
    print(f"{done} cases of seed {arguments.seed} clean in {time.monotonic() - start:.0f} s")
    return None


if __name__ == "__main__":
    sys.exit(main())
