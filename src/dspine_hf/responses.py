"""Batched responses of a target: greedy, or sampled with a seed per prompt, whatever batch a prompt is in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper


@dataclass
class Response:
    """The new tokens (with the end-of-sequence token, if it came) and whether it came."""

    tokens: list[int]
    stopped: bool


class SeededSampling(LogitsProcessor):
    """Makes the greedy choice a sample: each row adds Gumbel noise from its own generator to logits / temperature.

    Args:
        seeds: one per row. temperature: above 0. top_k, top_p: filters before the noise; 0 and 1 leave them out.
    """

    def __init__(
        self, seeds: Sequence[int], temperature: float, device: torch.device, top_k: int = 0, top_p: float = 1.0
    ):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = temperature
        self.filters: list[Any] = [TopKLogitsWarper(top_k)] if top_k > 0 else []
        self.filters += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self.temperature  # [batch, V]
        for warp in self.filters:
            scores = warp(input_ids, scores)
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log()


@torch.inference_mode()
def respond(
    target: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
    top_k: int = 0,
    top_p: float = 1.0,
    eos_ids: Sequence[int] | None = None,
) -> list[Response]:
    """Responses to a batch of prompts, padded on the left.

    Args:
        target: the causal LM. prompts: token ids.
        temperature: 0 is greedy; above it, `seeds` gives one seed per prompt.
        eos_ids: tokens that end a response; None: the target's own.
    """
    device = target.get_input_embeddings().weight.device
    ends = end_ids(target) if eos_ids is None else list(eos_ids)
    longest = max(len(prompt) for prompt in prompts)
    pad = ends[0] if ends else 0
    ids = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    processors = LogitsProcessorList()
    if temperature > 0:
        processors.append(SeededSampling(seeds, temperature, device, top_k, top_p))
    out = target.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        logits_processor=processors,
    )
    return [_cut(row, ends) for row in out[:, longest:].tolist()]


def end_ids(target: Any) -> list[int]:
    """The tokens that end a response, from the target's generation config."""
    found = target.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _cut(tokens: list[int], ends: list[int]) -> Response:
    place = next((i for i, token in enumerate(tokens) if token in ends), None)
    return Response(tokens, False) if place is None else Response(tokens[: place + 1], True)
