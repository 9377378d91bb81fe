"""`dspine train`: a drafter for a target, from its own responses; every training argument of Transformers applies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import enable_full_determinism, set_seed

from ..checkpoint import checkpoint_step
from ..embedded import TARGET_NAME
from ..loading import check_drafter, from_hub
from ..lora import add_lora
from ..modeling_dspine import DSpineDraftModel
from ..run_record import (
    RunRecord,
    config_options,
    curve_options,
    given_options,
    head_digest,
    name_of,
    rows_digest,
    start_digest,
)
from ..sequences import TokenSequences, load_sequences, split_prompts, token_counts
from ..sources import check_source
from ..training_facts import hardware, training_facts
from .common import Dtype, load_quietly, parse_fields

if TYPE_CHECKING:
    from ..training import DSpineTrainingArguments

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
EPILOG = (
    "Every field of DSpineTrainingArguments and of transformers.TrainingArguments is an option too: --max-steps 1000 "
    "--per-device-train-batch-size 8 --learning-rate 6e-4 --anchors-per-sequence 48 --loss-layer 0.3 --bf16 "
    "--report-to tensorboard ... Several GPUs: accelerate launch -m dspine_hf.cli train ..."
)


def run(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(help="Training data: the folder of 'dspine regenerate', or chat data (JSONL, Parquet, name)."),
    ],
    output_dir: Annotated[str, typer.Option(help="Where checkpoints and the finished drafter go.")] = "dspine-drafter",
    target: Annotated[
        str | None, typer.Option(help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct.")
    ] = None,
    target_dtype: Annotated[Dtype, typer.Option(help="Dtype of the frozen target.")] = Dtype.bfloat16,
    drafter: Annotated[str | None, typer.Option(help="Start from this drafter instead of a fresh one.")] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="Field of a fresh drafter's DSpineConfig, e.g. block_size=16. Repeatable.")
    ] = None,
    eval_size: Annotated[
        int, typer.Option(min=0, help="Hold out this many prompts, and select the model by acceptance length on them.")
    ] = 0,
    eval_data: Annotated[
        str | None, typer.Option(help="Evaluate on these sequences instead of held-out ones.")
    ] = None,
    lora: Annotated[
        int, typer.Option(min=0, help="Rank of LoRA layers; adapts --drafter, merged back at the end.")
    ] = 0,
    frequency_space: Annotated[
        bool, typer.Option(help="Fit the transfer space to the tokens' frequencies in the responses.")
    ] = False,
    thinking: Annotated[bool | None, typer.Option(help="Thinking mode of the chat template, for chat data.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest whole checkpoint in --output-dir.")] = True,
) -> None:
    """Train a drafter, or go on with it; stopped at any moment, the same command resumes."""
    from ..training import DSpineTrainer, last_complete_checkpoint

    args = parse_arguments(context.args, output_dir, bool(eval_size or eval_data))
    fields = parse_fields(config or [])
    console = Console(stderr=True, quiet=args.process_index > 0)
    # Before anything is multiplied on a GPU: what this sets in the environment is read at the first product alone.
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
    newest = last_complete_checkpoint(output_dir)
    checkpoint = newest if resume else None
    options = {
        **curve_options(args),
        "--target-dtype": target_dtype.value,
        "--eval-size": 0 if eval_data else eval_size,
        "--lora": lora,
        "--frequency-space": frequency_space,
        "--thinking": thinking,
    }
    record = RunRecord(Path(output_dir))
    begun = newest or (resume and (Path(output_dir) / "config.json").is_file())
    if begun:
        record.check({**options, **given_options(fields)})
    if drafter is not None:
        check_drafter(drafter)
    # Before the target is loaded, which may take minutes.
    reachable = {source: check_source(source) for source in (data, eval_data) if source is not None}
    model, tokenizer = load_quietly(target, target_dtype.torch)
    model = model.to(args.device)
    head = model.get_output_embeddings().weight
    rows = load_sequences(data, tokenizer, args.max_length, thinking, reachable[data])
    options["--target"] = f"{name_of(target or TARGET_NAME)} ({head_digest(head)})"
    options["--data"] = rows_digest(rows)
    held_out, split = None, ""
    if eval_data is not None:
        held_out = load_sequences(eval_data, tokenizer, args.max_length, thinking, reachable[eval_data])
        split = f"; {len(held_out)} others to evaluate on"
    elif eval_size:
        found = len(rows)
        rows, held_out = split_prompts(rows, eval_size)
        split = f"; {found - len(rows)} more, of {eval_size} prompts, are held out, {len(held_out)} of them greedy"
    counts = token_counts(rows, head.shape[0]) if frequency_space else None
    start = build_drafter(model, drafter, fields, counts)
    options["--drafter"] = None if drafter is None else start_name(drafter, output_dir, start)
    options.update(config_options(start.config))
    if begun:
        record.check(options)
    if lora:
        if drafter is None:
            raise ValueError("expected --drafter with the drafter that --lora adapts; found none. Name its folder.")
        add_lora(start, lora)
    trainer = DSpineTrainer(
        start.to(args.device),
        model,
        args,
        train_dataset=TokenSequences(rows, args.max_length),
        eval_dataset=None if held_out is None else TokenSequences(held_out, args.max_length),
    )
    resuming = f"; resuming from {checkpoint}" if checkpoint else ""
    console.print(f"{len(rows)} sequences to train on{split}{resuming}", style="dim", soft_wrap=True)
    # A folder of a run that kept no record goes on without one.
    recorded = args.process_index == 0 and (checkpoint is None or record.content is not None)
    if recorded:
        record.begin(options, 0 if checkpoint is None else checkpoint_step(checkpoint), hardware(args))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_drafter(output_dir, torch.bfloat16 if args.bf16 else torch.float32)
    trainer.save_state()
    if recorded:
        where = record.hardware(trainer.state.global_step)
        facts = training_facts(args, trainer.state, target, target_dtype.value, data, len(rows), drafter, lora, where)
        record.publish("training.json", facts)
    console.print(f"The drafter is in {output_dir}. Measure it: dspine eval --drafter {output_dir} ...", style="dim")


def parse_arguments(extra: list[str], output_dir: str, evaluates: bool) -> "DSpineTrainingArguments":
    """The options that are fields of the training arguments. With an evaluation set, the best checkpoint is kept.

    Raises:
        ValueError: an option is no field, or checkpoints would be saved that nobody evaluated.
    """
    from transformers import HfArgumentParser

    from ..training import DSpineTrainingArguments

    parser = HfArgumentParser(DSpineTrainingArguments, prog="dspine train", exit_on_error=False, allow_abbrev=False)
    defaults = ["--output_dir", output_dir]
    names = {word.split("=")[0].lstrip("-").replace("-", "_") for word in extra if word.startswith("--")}
    if not names & {"bf16", "fp16", "use_cpu"} and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        defaults += ["--bf16", "true"]
    if evaluates:
        defaults += [] if "eval_strategy" in names else ["--eval_strategy", "steps"]
        defaults += [] if "load_best_model_at_end" in names else ["--load_best_model_at_end", "true"]
        if not names & {"eval_steps", "save_steps"}:
            defaults += ["--eval_steps", "500"]
        elif "eval_steps" not in names:
            defaults += ["--eval_steps", _value(extra, "save_steps")]
        elif "save_steps" not in names:
            defaults += ["--save_steps", _value(extra, "eval_steps")]
    else:
        defaults += ["--metric_for_best_model", ""] if "metric_for_best_model" not in names else []
    try:
        args, unknown = parser.parse_args_into_dataclasses([*defaults, *extra], return_remaining_strings=True)
    except ValueError as error:
        if "load_best_model_at_end" in names or "load_best_model_at_end" not in str(error):
            raise
        given = ("eval_strategy", "save_strategy", "eval_steps", "save_steps")
        found = " ".join(f"--{name.replace('_', '-')} {_value(extra, name)}" for name in given if name in names)
        raise ValueError(
            "the best checkpoint is kept, so every one that is saved must be evaluated: expected --save-steps as a "
            f"multiple of --eval-steps, and the same --eval-strategy and --save-strategy; found {found}. Give one of "
            "the two steps alone, or --load-best-model-at-end false."
        ) from error
    if unknown:
        raise ValueError(
            f"expected options of dspine train or of transformers.TrainingArguments; found {' '.join(unknown)}. "
            "'dspine train --help' lists the former."
        )
    return args


def build_drafter(
    model: Any, drafter: str | None, fields: dict[str, Any], counts: torch.Tensor | None = None
) -> DSpineDraftModel:
    """A fresh fp32 drafter for `model`, or the one at `drafter`.

    Raises:
        ValueError: fields were given for an existing drafter.
    """
    if drafter is not None:
        if fields:
            raise ValueError("expected --config only for a fresh drafter; found --drafter too. Leave one of them out.")
        with from_hub(drafter):
            loaded = DSpineDraftModel.from_pretrained(drafter, dtype=torch.float32)
        loaded.check_target(model)
        return loaded
    return DSpineDraftModel.for_target(model, counts, **fields).float()


def start_name(drafter: str, output_dir: str, start: DSpineDraftModel) -> str:
    """What tells the drafter that a run starts from; one in the run's own folder is replaced when the run ends."""
    if Path(drafter).expanduser().resolve() == Path(output_dir).resolve():
        return "that in --output-dir"
    return f"{name_of(drafter)} ({start_digest(start)})"


def _value(words: list[str], name: str) -> str:
    for i, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.lstrip("-").replace("-", "_") == name:
            return value if equals else words[i + 1]
    raise ValueError(f"expected a value after --{name}; found none.")
