"""Random targets, drafters and arguments of generate(), drafted against plain; prints a reproducer of what differs.

python tests/fuzz.py --cases 2000 --seed 0        fresh cases, shrunk where one fails
python tests/fuzz.py --case '{"family": ...}'     one case again
"""

import argparse
import json
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from helpers.families import FAMILIES
from helpers.fuzzing import check

TOKENS = st.integers(0, 60)


def valid(drafter: dict) -> dict:
    """The nearest config that is not refused."""
    drafter = dict(drafter)
    if drafter.get("injection") == "none":
        drafter["selection"] = "independent"
    deepest = drafter["num_hidden_layers"] - 1 if drafter.get("injection", "all") == "all" else 0
    if "rewrite_layers" in drafter:
        drafter["rewrite_layers"] = min(drafter["rewrite_layers"], deepest)
    return drafter


drafters = st.fixed_dictionaries(
    {
        "block_size": st.integers(2, 8),
        "num_candidates": st.integers(1, 8),
        "num_hidden_layers": st.integers(1, 3),
        "miss_every": st.sampled_from([0, 1, 2, 3, 5, 1000]),  # 0: random weights
        "num_assistant_tokens": st.sampled_from([None, None, 1, 3]),
    },
    optional={
        "rewrite_layers": st.integers(0, 2),
        "injection_placement": st.sampled_from(["layer", "mlp"]),
        "injection": st.sampled_from(["all", "last", "none"]),
        "selection": st.sampled_from(["transition", "independent"]),
        "mask_token_id": st.just(3),
        "context_window": st.sampled_from([1, 4, 16]),
    },
).map(valid)
processors = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, 8),
        "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=4),
        "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=4),
        "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=3),
        "forced_eos_token_id": TOKENS,
        "renormalize_logits": st.just(True),
    },
)
warpers = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.6, 1.0, 1.4])},
    optional={
        "top_k": st.sampled_from([2, 6, 0]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "typical_p": st.just(0.8),
        "repetition_penalty": st.just(1.3),
    },
)
turns = st.fixed_dictionaries(
    {
        "new": st.integers(1, 4),  # tokens of the user's
        "before": st.sampled_from([None, None, "plain", "crop", "refill"]),  # what else happens to the cache
        "by": st.integers(1, 6),
        "full_ids": st.booleans(),
    }
)
cases = st.fixed_dictionaries(
    {
        "family": st.sampled_from(list(FAMILIES)),
        "target_seed": st.integers(0, 2),
        "drafter": drafters,
        "prompt": st.tuples(st.integers(1, 12), st.integers(0, 50)),  # length, seed
        "padding": st.sampled_from([0, 0, 0, 2]),
        "new_tokens": st.integers(1, 20),
        "processors": st.one_of(st.just({}), processors),
        # greedy text, one candidate, any sample, the law of samples
        "sample": st.sampled_from([*["no"] * 16, "one", "one", "free", "law"]),
        "warpers": warpers,
        "eos": st.lists(st.integers(0, 20), max_size=3),  # places in the plain text
        "stop": st.sampled_from([None, None, "length", "token", "scores"]),
        "stop_at": st.integers(1, 15),
        "streamer": st.booleans(),
        "interrupt": st.sampled_from([None, None, None, "criterion", "streamer", "processor"]),
        "interrupt_at": st.integers(0, 12),
        "cache": st.sampled_from(["none", "none", "dynamic", "dynamic", "static", "static by name"]),
        "turns": st.lists(turns, max_size=2),
        "states": st.booleans(),
        "attentions": st.booleans(),
    }
)


def fuzz(cases_wanted: int, seed: int, minutes: float | None = None) -> Counter:
    """Run cases; how each ended. A failure is shrunk, printed and raised."""
    ended: Counter[str] = Counter()
    end, last = time.monotonic() + 60 * (minutes or 1e9), {}

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
            found = check(case)
        except Exception:
            last["case"] = case
            raise
        ended.update(found)

    try:
        run()
    except BaseException:
        if last:
            print(f"\nReproduce with:\n  python tests/fuzz.py --case '{json.dumps(last['case'])}'", flush=True)
        raise
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="start no case after so long")
    parser.add_argument("--case", type=json.loads, help="run this case alone")
    arguments = parser.parse_args()
    if arguments.case:
        return print(check(arguments.case))
    start = time.monotonic()
    ended = fuzz(arguments.cases, arguments.seed, arguments.minutes)
    print(f"{ended['cases']} cases of seed {arguments.seed} clean in {time.monotonic() - start:.0f} s")
    print(", ".join(f"{what}: {count}" for what, count in sorted(ended.items())))
    return None


if __name__ == "__main__":
    sys.exit(main())
