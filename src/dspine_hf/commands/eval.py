"""`dspine eval`: acceptance length, acceptance by slot and speed-up of a drafter on prompt sets."""

import hashlib
import importlib.util
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..benchmarks import Benchmark, load_benchmarks, prompt_files, within_positions
from ..bootstrap import compare
from ..evaluation import Evaluator, summarise
from ..journal import Journal, write_atomically
from ..plots import plot_results
from ..responses import respond
from ..seeds import hash_seed
from ..sources import check_source
from .common import Device, Dtype, load_pair, usable_device

RECORDS = "prompts.jsonl"
RESULTS = "results.json"


def run(
    prompts: Annotated[
        list[str],
        typer.Option(help="Prompt set: a JSONL or Parquet file with 'turns' or 'messages', or a folder. Repeatable."),
    ],
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the drafter; default: the embedded target's own.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Where results.json and the pictures go.")] = Path("dspine-eval"),
    temperature: Annotated[list[float], typer.Option(min=0.0, help="Repeatable.")] = [0.0, 1.0],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many prompts of each set.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of each answer, in tokens.")] = 256,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Leave out longer prompts.")] = None,
    context_length: Annotated[
        list[int], typer.Option(min=1, help="Put text before each question, up to so many tokens in all. Repeatable.")
    ] = [],  # noqa: B006
    offline: Annotated[
        bool, typer.Option(help="Compute acceptance exactly at T = 0 from the target's greedy text; no speed-up.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered at once, with --offline.")] = 16,
    thinking: Annotated[bool | None, typer.Option(help="Thinking mode of the chat template.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Output folder of another drafter's evaluation to compare with.")
    ] = None,
    training_state: Annotated[
        Path | None, typer.Option(help="trainer_state.json of the drafter's training, for a picture over steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of target and drafter.")] = Dtype.bfloat16,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json and nothing else.")] = False,
) -> None:
    """Measure a drafter; stopped at any moment, the same command goes on where it was."""
    console = Console(stderr=as_json)
    usable_device(device)
    reachable = {file: check_source(file) for file in prompt_files(prompts)}  # before the target is loaded
    pair = load_pair(target, drafter, dtype.torch, device)
    contexts = within_positions(context_length, pair.target.config, max_new_tokens)
    if contexts != context_length:
        console.print(
            f"The target has positions for {max_new_tokens} tokens after at most {max(contexts)}.", style="dim"
        )
    sets = [
        found
        for context in contexts or (None,)
        for found in load_benchmarks(prompts, pair.tokenizer, limit, thinking, max_prompt_tokens, context, reachable)
    ]
    settings: dict[str, Any] = {
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "drafter_fingerprint": weights_digest(pair.drafter),
        "offline": offline,
        "max_new_tokens": max_new_tokens,
        "context_length": contexts,
        "thinking": thinking,
        "seed": seed,
        "dtype": dtype.value,
        "device": pair.target.device.type,
        "prompts": {s.name: prompts_digest(s.prompts) for s in sets},
    }
    journal = Journal(output_dir / RECORDS, settings)
    evaluator = Evaluator(pair.target, pair.drafter, max_new_tokens, seed)
    temperatures = [0.0] if offline else list(dict.fromkeys(temperature))
    measure_all(console, journal, evaluator, sets, temperatures, offline, batch_size)
    results = collect(journal.entries, settings, temperatures)
    other = None if against is None else _records(against / RECORDS)
    if other is not None:
        results["comparison"] = compare_all(journal.entries, other, temperatures)
    write_atomically(output_dir / RESULTS, json.dumps(results, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        plot_results(results, output_dir, training_state)
    if as_json:
        print(json.dumps(results))
        return
    for table in tables(results, temperatures):
        console.print(table)
    _print_comparison(console, results.get("comparison", {}), against)
    console.print(f"Written to {output_dir}", style="dim")


def measure_all(
    console: Console,
    journal: Journal,
    evaluator: Evaluator,
    sets: list[Benchmark],
    temperatures: list[float],
    offline: bool,
    batch_size: int,
) -> None:
    """Measure every prompt that the journal does not hold yet."""
    done = {(e["temperature"], e["benchmark"], e["index"]) for e in journal.entries}
    work = [(t, s, i) for t in temperatures for s in sets for i in range(len(s.prompts)) if (t, s.name, i) not in done]
    if work and not offline:
        evaluator.warm_up(work[0][1].prompts[0])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(work) + len(done), completed=len(done))
        measured = offline_records(evaluator, work, batch_size) if offline else loop_records(evaluator, work)
        for record in measured:
            journal.append(record)
            progress.update(task, advance=1, description=f"{record['benchmark']}, T = {record['temperature']:g}")


def loop_records(evaluator: Evaluator, work: list[tuple[float, Benchmark, int]]) -> Iterator[dict[str, Any]]:
    """One record per prompt from generate(); plain and drafted take turns at going first."""
    for temperature, benchmark, i in work:
        seed = hash_seed(zlib.crc32(benchmark.name.encode()), i)
        record = evaluator.loop(benchmark.prompts[i], temperature, seed, drafted_first=i % 2 == 1)
        yield {"benchmark": benchmark.name, "index": i, "temperature": temperature, **record}


def offline_records(
    evaluator: Evaluator, work: list[tuple[float, Benchmark, int]], batch_size: int
) -> Iterator[dict[str, Any]]:
    """One record per prompt from the target's greedy text, which is written in batches where it is not known."""
    work = sorted(work, key=lambda item: len(item[1].prompts[item[2]]))
    for start in range(0, len(work), batch_size):
        batch = work[start : start + batch_size]
        unknown = [(s, i) for _, s, i in batch if s.continuations is None]
        written = iter(
            respond(evaluator.target, [s.prompts[i] for s, i in unknown], evaluator.max_new_tokens) if unknown else ()
        )
        for _, benchmark, i in batch:
            known = benchmark.continuations
            continuation = next(written).tokens if known is None else known[i][: evaluator.max_new_tokens]
            record = evaluator.offline(benchmark.prompts[i], continuation)
            yield {"benchmark": benchmark.name, "index": i, "temperature": 0.0, **record}


def collect(records: list[dict[str, Any]], settings: dict[str, Any], temperatures: list[float]) -> dict[str, Any]:
    """The content of results.json: the first temperature's figures at the top, and every temperature's by name."""
    figures = {f"{t:g}": summarise(r for r in records if r["temperature"] == t) for t in temperatures}
    for found in figures.values():
        by_context = {
            str(n): [row["acceptance_length"] for name, row in found["benchmarks"].items() if name.endswith(f"@{n}")]
            for n in settings["context_length"]
        }
        if by_context:
            found["acceptance_length_by_context"] = {n: round(sum(v) / len(v), 4) for n, v in by_context.items()}
    return {**figures[f"{temperatures[0]:g}"], "temperatures": figures, "settings": settings}


def compare_all(ours: list[dict], theirs: list[dict], temperatures: list[float]) -> dict[str, Any]:
    """Paired bootstrap at every temperature that both evaluations have, with and without loop tails."""
    result = {}
    for t in temperatures:
        a, b = ([r for r in rows if r["temperature"] == t] for rows in (ours, theirs))
        if a and b:
            result[f"{t:g}"] = {"all": compare(a, b), "without_loops": compare(a, b, without_loops=True)}
    return result


def tables(results: dict[str, Any], temperatures: list[float]) -> Iterator[Table]:
    """One table per temperature."""
    settings = results["settings"]
    for t in temperatures:
        figures = results["temperatures"][f"{t:g}"]
        title = (
            f"{settings['drafter']} on {settings['target']}, T = {t:g}, {settings['dtype']} on {settings['device']}"
        )
        caption = "acceptance by slot: " + " ".join(f"{rate:.2f}" for rate in figures["slot_acceptance"])
        for context, length in figures.get("acceptance_length_by_context", {}).items():
            caption += f"\nacceptance length behind {context} tokens of context: {length:.2f}"
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        timed = "mean_speedup" in figures
        table.add_column("benchmark", overflow="fold", min_width=9)
        names = ["acc.\nlength", "95 %", "no\nloops"]
        for name in names + (["plain\ntok/s", "drafted\ntok/s", "speed-\nup"] if timed else []):
            table.add_column(name, justify="right", no_wrap=True)
        for name, row in figures["benchmarks"].items():
            table.add_row(name, *_cells(row, timed))
        table.add_section()
        mean = [
            f"{figures['mean_acceptance_length']:.2f}",
            "",
            f"{figures['mean_acceptance_length_without_loops']:.2f}",
        ]
        mean += ["", "", f"{figures['mean_speedup']:.2f}x"] if timed else []
        table.add_row("mean", *mean, style="bold")
        yield table


def _cells(row: dict[str, Any], timed: bool) -> list[str]:
    low, high = row["acceptance_length_interval"]
    cells = [
        f"{row['acceptance_length']:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{row['acceptance_length_without_loops']:.2f}",
    ]
    if timed:
        cells += [f"{row[name]:.1f}" for name in ("tokens_per_second_plain", "tokens_per_second_drafted")]
        cells.append(f"{row['speedup']:.2f}x")
    return cells


def _print_comparison(console: Console, comparison: dict[str, Any], against: Path | None) -> None:
    for temperature, kinds in comparison.items():
        for kind, found in kinds.items():
            low, high = found["interval"]
            title = f"T = {temperature}, {kind.replace('_', ' ')}"
            console.print(
                f"{title}: {found['ours']:.3f} / {found['theirs']:.3f} of {against} "
                f"= {found['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}, {found['prompts']} prompts)",
                highlight=False,
            )


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"expected {path.name} of an earlier 'dspine eval' in '{path.parent}'; found none.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[1:] if line]


def prompts_digest(prompts: list[list[int]]) -> str:
    """What tells one prompt set from another."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def weights_digest(drafter: Any) -> str:
    """What tells one drafter's weights from another's: sums that any training step changes."""
    with torch.no_grad():
        sums = [f"{float(p.double().abs().sum()):.9e}" for p in drafter.parameters()]
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]
