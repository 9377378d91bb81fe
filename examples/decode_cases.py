"""What bench_decode.py decodes: a target and its drafter, loaded or of random weights, prompts, and a clock."""

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import dspine_hf
from dspine_hf.embedded import load_embedded_target
from dspine_hf.loading import load_drafter, load_target
from dspine_hf.sources import read_jsonl

SHAPES = {
    "tiny": (64, 128, 4, 4, 2, 16, 256),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936),
}
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QUESTIONS = (
    "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how fast it is.",
    "What is the sum of the first 100 odd numbers? Show your reasoning.",
    "Explain to a child why the sky is blue.",
)


def load(args: Namespace) -> tuple:
    """(target, drafter, tokenizer or None)."""
    dtype = getattr(torch, args.dtype)
    if args.shapes is None:
        load_it = load_target if args.target else lambda _, **options: load_embedded_target(**options)
        target, tokenizer = load_it(args.target, dtype=dtype)
        target = target.to(args.device)
        drafter = load_drafter(args.drafter, target)
    else:
        *widths, head_dim, vocabulary = SHAPES[args.shapes]
        config = Qwen3Config(**dict(zip(FIELDS, widths, strict=True)), head_dim=head_dim, vocab_size=vocabulary)
        torch.manual_seed(0)
        with torch.device(args.device):
            target = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
            shape = dspine_hf.DSpineConfig.for_target(config, block_size=args.block_size)
            drafter = dspine_hf.DSpineDraftModel._from_config(shape, dtype=dtype)
        tokenizer = None
    target.generation_config.update(temperature=None, top_p=None, top_k=None)
    drafter.config.use_fused_kernels = args.fused
    return target.eval().requires_grad_(False), drafter.eval().requires_grad_(False), tokenizer


def batch_of(args: Namespace, tokenizer: Any, size: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """A left-padded batch of prompts; random ids without a tokenizer."""
    if tokenizer is None:
        ids = torch.randint(vocabulary, (size, args.context), generator=torch.Generator().manual_seed(size))
        return {"input_ids": ids.to(args.device), "attention_mask": torch.ones_like(ids).to(args.device)}
    turns = [row["turns"][0] for row in read_jsonl(Path(args.prompts))] if args.prompts else list(QUESTIONS)
    chats = [[{"role": "user", "content": turns[i % len(turns)]}] for i in range(size)]
    tokenizer.padding_side = "left"
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(chats, **options).to(args.device))


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Median seconds of `run`, after three runs that do not count."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        synchronise(device)
        began = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def new_tokens(out: torch.Tensor, length: int, target: Any) -> int:
    """Tokens up to and with each row's end of sequence."""
    ends = target.generation_config.eos_token_id
    ids = torch.tensor([-1] if ends is None else ends, device=out.device).view(-1)
    ended = (out[:, length:, None] == ids).any(-1).cumsum(-1)
    before = torch.nn.functional.pad(ended[:, :-1], (1, 0))
    return int((before == 0).sum())
