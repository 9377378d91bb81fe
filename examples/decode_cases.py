"""What bench_decode.py decodes: a target and its drafter, loaded or of random weights, prompts, and a clock."""

import time
from argparse import Namespace
from collections.abc import Callable
from itertools import zip_longest
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


def questions(args: Namespace) -> list[str]:
    """The first turns of the prompt files, `args.per_set` of each, one of every file in turn."""
    if not args.prompts:
        return list(QUESTIONS)
    sets = [[row["turns"][0] for row in read_jsonl(Path(file))][: args.per_set] for file in args.prompts]
    return [turn for together in zip_longest(*sets) for turn in together if turn is not None]


def batches_of(args: Namespace, tokenizer: Any, size: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Left-padded batches of all prompts, the widest first; one of random ids without a tokenizer."""
    if tokenizer is None:
        ids = torch.randint(vocabulary, (size, args.context), generator=torch.Generator().manual_seed(size))
        return [{"input_ids": ids.to(args.device), "attention_mask": torch.ones_like(ids).to(args.device)}]
    turns = questions(args)
    turns = [turns[i % len(turns)] for i in range(max(size, len(turns) // size * size))]  # every batch is full
    tokenizer.padding_side = "left"
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    chats = [[{"role": "user", "content": turn}] for turn in turns]
    pieces = [chats[i : i + size] for i in range(0, len(chats), size)]
    batches = [dict(tokenizer.apply_chat_template(piece, **options).to(args.device)) for piece in pieces]
    return sorted(batches, key=lambda batch: -batch["input_ids"].shape[1])


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


def new_tokens(out: torch.Tensor, length: int, target: Any) -> list[list[int]]:
    """Each row's new tokens, up to and with its end of sequence."""
    ends = target.generation_config.eos_token_id
    ends = [] if ends is None else torch.tensor(ends).view(-1).tolist()
    texts = []
    for row in out[:, length:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        texts.append(row[:stop])
    return texts
