"""`dspine regenerate`: training data whose responses the target writes itself."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from ..benchmarks import encode_chat, user
from ..data import Prompt, TargetWriter, answer_batches, make_batches, read_prompts, self_prompts, write_dataset
from ..embedded import TARGET_NAME
from ..journal import Journal, write_atomically
from ..server import ServerWriter, answer_from_server
from .common import Device, Dtype, load_quietly, usable_device

RESPONSES = "responses.jsonl"
SELF_PROMPTS = "self-prompts.jsonl"
RECORD = "regenerate.json"


def run(
    output_dir: Annotated[Path, typer.Option(help="The data set's folder; 'dspine train --data' reads it.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSONL or Parquet file, data set's folder or name, with 'turns', 'messages' or 'prompt'."),
    ] = None,
    self_prompt_count: Annotated[
        int, typer.Option("--self-prompts", min=0, help="Let the target write this many user turns itself.")
    ] = 0,
    target: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="OpenAI-compatible endpoint that serves the target, e.g. http://host:8000/v1.")
    ] = None,
    server_model: Annotated[str | None, typer.Option(help="Name of the served model; default: the target's.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time, with --server.")] = 32,
    temperature: Annotated[
        list[float], typer.Option(min=0.0, help="0 is greedy. Repeatable: every prompt is answered once at each.")
    ] = [0.0],  # noqa: B006
    top_k: Annotated[int, typer.Option(min=0, help="Sample among so many tokens only; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this share of the probability.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of each response, in tokens.")] = 1024,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Leave out prompts whose first turn is longer.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many prompts of each source.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Responses written at once.")] = 32,
    thinking: Annotated[bool | None, typer.Option(help="Thinking mode of the chat template; recorded.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the target.")] = Dtype.bfloat16,
    device: Device = None,
) -> None:
    """Let the target answer prompts; stopped at any moment, the same command goes on where it was."""
    if not prompts and not self_prompt_count:
        raise ValueError("expected --prompts or --self-prompts; found neither. Name a file of prompts.")
    if server and self_prompt_count:
        raise ValueError(
            "--self-prompts needs the target itself; found --server. Give --prompts, or leave --server out."
        )
    settings: dict[str, Any] = {
        "target": target or TARGET_NAME,
        "prompts": prompts or [],
        "self_prompts": self_prompt_count,
        "limit": limit,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "enable_thinking": thinking,
        "seed": seed,
        **({"server": server} if server else {"batch_size": batch_size, "dtype": dtype.value}),
    }
    # A server may have taken all the memory of the GPU, which nothing here needs then.
    place = usable_device("cpu" if server and device is None else device)
    texts = read_prompts(prompts or [], limit)  # before the target is loaded
    journal = Journal(output_dir / RESPONSES, settings, key=lambda entry: (entry["id"], entry["variant"]))
    model, tokenizer = load_writer_parts(target, dtype, place, tokenizer_only=server is not None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        if self_prompt_count:
            task = progress.add_task("self-prompts", total=self_prompt_count)
            written = Journal(output_dir / SELF_PROMPTS, settings, key=lambda entry: entry["index"])
            texts += self_prompts(
                model,
                tokenizer,
                self_prompt_count,
                written,
                batch_size,
                seed,
                done=lambda n: progress.advance(task, n),
            )
        kept, lengths = within_limit(texts, tokenizer, thinking, max_prompt_tokens)
        batches = make_batches(kept, temperature, lengths, batch_size)
        answers = progress.add_task("responses", total=len(kept) * len(temperature))
        if server:
            sender = ServerWriter(
                server, server_model or target or TARGET_NAME, tokenizer, max_new_tokens, thinking, top_p
            )
            jobs = [job for batch in batches for job in batch]
            answer_from_server(sender, jobs, journal, seed, concurrency, lambda n: progress.advance(answers, n))
        else:
            writer = TargetWriter(model, tokenizer, max_new_tokens, thinking, top_k, top_p)
            answer_batches(writer, batches, journal, seed, lambda n: progress.advance(answers, n))
    rows = write_dataset(journal, output_dir)
    record = {**settings, "chat_template": tokenizer.chat_template, "rows": rows}
    write_atomically(output_dir / RECORD, json.dumps(record, indent=1) + "\n")
    console.print(
        f"{rows} responses in {output_dir}. Train on them: dspine train --data {output_dir} ...", style="dim"
    )


def within_limit(
    prompts: list[Prompt], tokenizer: Any, thinking: bool | None, longest: int | None
) -> tuple[list[Prompt], list[int]]:
    """The prompts whose first turn has at most `longest` tokens, and those numbers of tokens. ValueError for none."""
    lengths = [len(encode_chat(tokenizer, [user(prompt.turns[0])], thinking)) for prompt in prompts]
    kept = [i for i, length in enumerate(lengths) if longest is None or length <= longest]
    if not kept:
        raise ValueError(f"expected prompts of at most {longest} tokens; found none among {len(prompts)}.")
    return [prompts[i] for i in kept], [lengths[i] for i in kept]


def load_writer_parts(target: str | None, dtype: Dtype, device: torch.device, tokenizer_only: bool) -> tuple[Any, Any]:
    """The target (None where a server answers) and its tokenizer."""
    if tokenizer_only and target is not None and not target.endswith(".gguf"):
        return None, AutoTokenizer.from_pretrained(target)
    model, tokenizer = load_quietly(target, dtype.torch)
    return (None if tokenizer_only else model.to(device)), tokenizer
