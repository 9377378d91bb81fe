"""`dspine demo`: the embedded target with and without its drafter, first to watch, then measured."""

import copy
import json
import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..embedded import TARGET_NAME
from .common import Answer, Device, Dtype, Pair, answer, encode, load_pair, loop_options
from .demo_view import drafted_by, show, watch

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train travels 60 km in 45 minutes. What is its average speed in km/h? Think step by step.",
    "List five habits that help people sleep better.",
    "Write a short e-mail asking a colleague to review a report by Friday.",
    "What is photosynthesis, and why does it matter?",
    "Write a SQL query that counts the orders of each customer.",
    "Give me a simple recipe for vegetable soup.",
)
WATCHED = PROMPTS[1]  # the one that is streamed before all are measured


@dataclass
class Comparison:
    """One prompt answered both ways."""

    plain: Answer
    drafted: Answer

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token that differs; None when both answers are the same tokens."""
        ours, theirs = self.drafted.token_ids, self.plain.token_ids
        if ours == theirs:
            return None
        shared = min(len(ours), len(theirs))
        return next((i for i in range(shared) if ours[i] != theirs[i]), shared)

    @property
    def speedup(self) -> float:
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


@dataclass
class Trial:
    """One prompt of the demo: timed in the dtype of use, its text compared in float32.

    A pass over several tokens rounds differently from a pass over one, so in 16 bits, where the two best tokens are
    often tied to the last bit, either may win. In float32 the texts must be the same.
    """

    prompt: str
    timed: Comparison
    exact: Comparison


def run(
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the drafter; default: the one trained for this target.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many prompts to measure.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of each answer, in tokens.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="Dtype that is timed; texts are compared in float32.")] = Dtype.bfloat16,
    device: Device = None,
    fast: Annotated[bool, typer.Option("--fast", help="Draft in the package's own loop, dspine_hf.generate.")] = False,
    tree_nodes: Annotated[
        int | None, typer.Option(min=1, help="In that loop: verify trees of so many drafted tokens, not chains.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer the same prompts plain and drafted, on a small chat model that needs no download, and compare."""
    loop = loop_options(fast, tree_nodes)
    console = Console(file=sys.stderr if as_json else sys.stdout, quiet=as_json)
    with console.status(f"Loading {TARGET_NAME} and its drafter"):
        pair = load_pair(None, drafter, dtype.torch, device)
        exact = pair if dtype is Dtype.float32 else in_float32(pair)
    for drafted in (False, True):  # the first call of each kind pays for allocations and kernel choice
        inputs = encode(pair.tokenizer, PROMPTS[0], pair.target.device)
        answer(pair, inputs, drafted=drafted, max_new_tokens=12, loop=loop if drafted else None)
    if not as_json:
        watch(console, exact, WATCHED, max_new_tokens, dtype.value, loop)
    with console.status("Measuring") as status:
        trials = []
        for index, prompt in enumerate(PROMPTS[:prompts]):
            status.update(f"Measuring prompt {index + 1} of {prompts}, plain and drafted")
            timed = compare(pair, prompt, max_new_tokens, index % 2 == 1, loop)
            same = timed if exact is pair else compare(exact, prompt, max_new_tokens, loop=loop)
            trials.append(Trial(prompt, timed, same))
    result = {**summarise(pair, trials, max_new_tokens), "drafted_by": drafted_by(loop)}
    if as_json:
        print(json.dumps(result))
    else:
        show(console, result)


def in_float32(pair: Pair) -> Pair:
    """The same target and drafter, their weights cast up."""
    return replace(pair, target=copy.deepcopy(pair.target).float(), drafter=copy.deepcopy(pair.drafter).float())


def compare(
    pair: Pair, prompt: str, max_new_tokens: int, drafted_first: bool = False, loop: dict[str, Any] | None = None
) -> Comparison:
    """Answer one prompt greedily both ways. Callers alternate the order, so that a drift of the clock cancels.

    `loop`: see [`answer`]; plain answers are always generate()'s.
    """
    inputs = encode(pair.tokenizer, prompt, pair.target.device)
    answers = {
        drafted: answer(pair, inputs, drafted=drafted, max_new_tokens=max_new_tokens, loop=loop if drafted else None)
        for drafted in (drafted_first, not drafted_first)
    }
    return Comparison(answers[False], answers[True])


def summarise(pair: Pair, trials: list[Trial], max_new_tokens: int) -> dict[str, Any]:
    """Everything measured, as JSON: medians over the prompts; acceptance length over all rounds of all prompts."""
    timed = [trial.timed for trial in trials]
    rounds = sum(c.drafted.stats.rounds for c in timed)
    return {
        "identical": all(trial.exact.first_difference is None for trial in trials),
        "speedup": round(median(c.speedup for c in timed), 4),
        "acceptance_length": round(sum(len(c.drafted.token_ids) - 1 for c in timed) / max(rounds, 1), 4),
        "tokens_per_second_plain": round(median(c.plain.tokens_per_second for c in timed), 4),
        "tokens_per_second_drafted": round(median(c.drafted.tokens_per_second for c in timed), 4),
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "text_compared_in": "float32",
        "timed_in": str(pair.target.dtype).removeprefix("torch."),
        "identical_answers_when_timed": sum(c.first_difference is None for c in timed),
        "device": pair.target.device.type,
        "threads": torch.get_num_threads(),
        "max_new_tokens": max_new_tokens,
        "prompts": [_details(trial) for trial in trials],
    }


def _details(trial: Trial) -> dict[str, Any]:
    timed = trial.timed
    return {
        "prompt": trial.prompt,
        "identical": trial.exact.first_difference is None,
        "first_difference": trial.exact.first_difference,
        "first_difference_when_timed": timed.first_difference,
        "new_tokens": len(timed.drafted.token_ids),
        "speedup": round(timed.speedup, 4),
        "acceptance_length": round(timed.drafted.stats.acceptance_length, 4),
        "tokens_per_second_plain": round(timed.plain.tokens_per_second, 4),
        "tokens_per_second_drafted": round(timed.drafted.tokens_per_second, 4),
    }
