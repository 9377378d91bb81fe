"""Draws short texts with a drafter, end to end, and tests their frequencies against the target's exact law.

A target of six tokens lets every text of three tokens be counted. Run `python examples/sampling_law.py`: each line
shows one setting, the share of drafted tokens accepted, and the chi-square p-value (small means wrong).
"""

import argparse
from collections import Counter
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import LogitsProcessorList

from dspine_hf import DSpineDraftModel

VOCABULARY, TOKENS = 6, 3
PROMPT = torch.tensor([[1, 4, 2, 5]])
SETTINGS = {
    "T=1": {},
    "T=0.7": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.5},
    "repetition penalty": {"repetition_penalty": 1.5},
    "typical (full rows)": {"typical_p": 0.8},
}


def make_models() -> tuple[LlamaForCausalLM, DSpineDraftModel]:
    """A random target and a drafter with random injections, so that predecessors matter."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    target.lm_head.weight.data.normal_(0, 0.25)
    drafter = DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=4, num_candidates=4)
    for layer in drafter.layers:
        layer.injection.U.weight.data.normal_(0, 0.5)
    return target.eval(), drafter.eval()


@torch.no_grad()
def exact_law(target: LlamaForCausalLM, options: dict) -> dict[tuple[int, ...], float]:
    """The target's probability of every text of three tokens, from plain forward passes and its own processors."""
    config = target._prepare_generation_config(None, do_sample=True, **options)[0]
    target._prepare_special_tokens(config, False, device=PROMPT.device, batch_size=1)
    processors: LogitsProcessorList = target._get_logits_processor(
        config, input_ids_seq_length=PROMPT.shape[1], encoder_input_ids=PROMPT, device="cpu"
    )
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, probability in law.items():
            ids = torch.cat([PROMPT, torch.tensor([text], dtype=torch.long)], dim=1)
            p = processors(ids, target(ids).logits[:, -1]).softmax(-1)[0].tolist()
            longer.update({(*text, token): probability * p[token] for token in range(VOCABULARY)})
        law = longer
    return law


def p_value(counts: Counter, law: dict[tuple[int, ...], float], draws: int) -> float:
    """Chi-square of the counts; texts expected fewer than five times share one cell."""
    cells = [(counts[text], law[text] * draws) for text in product(range(VOCABULARY), repeat=TOKENS)]
    large = [(seen, mean) for seen, mean in cells if mean >= 5]
    rest = (draws - sum(seen for seen, _ in large), draws - sum(mean for _, mean in large))
    large += [rest] if rest[1] >= 1 else []
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in large)
    halves = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000, help="texts per setting")
    draws = parser.parse_args().draws
    target, drafter = make_models()
    for name, options in SETTINGS.items():
        options = {"top_k": 0, **options}
        counts, drafted, accepted = Counter(), 0, 0
        for _ in range(draws):
            text = target.generate(PROMPT, max_new_tokens=4, do_sample=True, assistant_model=drafter, **options)
            counts[tuple(text[0, PROMPT.shape[1] :][:TOKENS].tolist())] += 1
            drafted += drafter.generation_stats.drafted
            accepted += drafter.generation_stats.accepted
        p = p_value(counts, exact_law(target, options), draws)
        print(
            f"{name:20s} {draws} draws, {accepted / drafted:.0%} of {drafted} drafts accepted, p = {p:.4f}", flush=True
        )


if __name__ == "__main__":
    main()
