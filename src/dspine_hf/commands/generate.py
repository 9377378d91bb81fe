"""`dspine generate`: one prompt, answered by a target with its drafter."""

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ..embedded import TARGET_NAME
from .common import Answer, Device, Dtype, Pair, answer, encode, load_pair, loop_options


def run(
    prompt: Annotated[str, typer.Option(help="What to answer.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Hub name, folder or .gguf file of the target; default: the embedded SmolLM2-135M-Instruct."
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the drafter trained for that target.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily; above, samples.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answer, in tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of target and drafter.")] = Dtype.bfloat16,
    device: Device = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Decode with the package's own loop, dspine_hf.generate.")
    ] = False,
    tree_nodes: Annotated[
        int | None, typer.Option(min=1, help="With the loop: verify trees of so many drafted tokens, not chains.")
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="With the loop: draft only as far as it pays by the clock.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With the loop: passes through torch.compile; the first take minutes.")
    ] = False,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="With the loop: candidates per slot, at most the drafter's own.")
    ] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Draft with the Triton kernels.")] = False,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the target's chat template, if it has one.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer one prompt with a drafter; the text goes to stdout as it comes, the figures to stderr.

    --tree-nodes, --adaptive, --compile and --candidates decode with the loop, as --fast does.
    """
    loop = loop_options(fast, tree_nodes, adaptive, compiled and ("fused" if fused else True), candidates)
    if tree_nodes is not None and temperature > 0:
        raise ValueError(
            f"--tree-nodes {tree_nodes}: trees are for greedy decoding; found --temperature {temperature:g}. "
            "Leave one of them out."
        )
    notes = Console(stderr=True, quiet=as_json, highlight=False)
    notes.print(f"Loading {target or TARGET_NAME} and its drafter", style="dim", markup=False)
    pair = load_pair(target, drafter, dtype.torch, device, **({"use_fused_kernels": True} if fused else {}))
    with torch.no_grad():
        _ = pair.drafter.ops  # chosen here, so that a warning of it comes before the answer
    torch.manual_seed(seed)
    inputs = encode(pair.tokenizer, prompt, pair.target.device, chat)
    result = answer(
        pair,
        inputs,
        drafted=True,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        loop=loop,
        on_text=None if as_json else lambda piece: print(piece, end="", flush=True),
    )
    if as_json:
        print(json.dumps(report(pair, result)))
        return
    print()
    figures = (
        f"{len(result.token_ids)} tokens in {result.seconds:.1f} s ({result.tokens_per_second:.1f} tokens/s), "
        f"{result.stats.rounds} target passes, acceptance length {result.stats.acceptance_length:.2f}"
    )
    notes.print(figures, style="dim")


def report(pair: Pair, result: Answer) -> dict[str, Any]:
    """The answer and its figures, as JSON."""
    stats = result.stats
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "new_tokens": len(result.token_ids),
        "seconds": round(result.seconds, 4),
        "tokens_per_second": round(result.tokens_per_second, 4),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": round(stats.acceptance_length, 4),
        "slot_acceptance": [round(float(p), 4) for p in stats.slot_acceptance],
        "target": pair.target_name,
        "drafter": pair.drafter_name,
    }
