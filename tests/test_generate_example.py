"""The end-to-end sampling law, with a few draws of each setting and the example's own models."""

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "sampling_law.py"))


@pytest.mark.parametrize("name", EXAMPLE["SETTINGS"])
def test_texts_drawn_with_a_drafter_follow_the_targets_law(name):
    target, drafter = EXAMPLE["make_models"]()
    prompt, tokens, draws = EXAMPLE["PROMPT"], EXAMPLE["TOKENS"], 60
    options = {"top_k": 0, **EXAMPLE["SETTINGS"][name]}
    law = EXAMPLE["exact_law"](target, options)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    singles = [{}, {}, {}]
    counts = [Counter(), Counter(), Counter()]
    for text, probability in law.items():
        for place, token in enumerate(text):
            singles[place][token] = singles[place].get(token, 0.0) + probability
    torch.manual_seed(1)
    accepted = 0
    for _ in range(draws):
        ids = target.generate(prompt, max_new_tokens=4, do_sample=True, assistant_model=drafter, **options)
        accepted += drafter.generation_stats.accepted
        for place, token in enumerate(ids[0, prompt.shape[1] :][:tokens].tolist()):
            counts[place][token] += 1
    assert accepted > 5
    for place in range(tokens):
        for token, probability in singles[place].items():
            deviation = (probability * (1 - probability) * draws) ** 0.5
            assert abs(counts[place][token] - probability * draws) <= 5 * deviation + 1e-9
