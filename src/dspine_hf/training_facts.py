"""What a training run knows of itself for the model card: the content of training.json."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint import checkpoint_step, read_json
from .embedded import TARGET_HUB_NAME
from .run_record import name_of
from .sources import LINES

if TYPE_CHECKING:
    from transformers import TrainerState

    from .training import DSpineTrainingArguments


def training_facts(
    args: "DSpineTrainingArguments",
    state: "TrainerState",
    target: str | None,
    target_dtype: str,
    data: str,
    sequences: int,
    drafter: str | None,
    lora: int,
    where: str,
) -> dict[str, Any]:
    """The facts of a finished run; None stands for what it cannot know and its author has to write.

    Args:
        target, data, drafter: as they were named; None: the embedded target, a fresh drafter.
        sequences: how many were trained on. lora: the rank of LoRA layers, if any. where: the hardware.
    """
    procedure = {
        "target": f"{name_of(target or TARGET_HUB_NAME)} in {target_dtype}, frozen",
        "start": None if drafter is None else name_of(drafter) + (f", with LoRA of rank {lora}" if lora else ""),
        "steps": _steps(args, state),
        "kept": _kept(args, state),
        "loss": _loss(args),
        "optimizer": "Muon for matrices, AdamW for the rest" if args.optim_drafter == "muon" else _word(args.optim),
        "learning rate": f"{args.learning_rate:g}, {_word(args.lr_scheduler_type)}, {_warmup(args)}",
        "precision": _precision(args),
        "seed": str(args.seed),
        "hardware": where,
    }
    return {
        "base_model": _base_model(target),
        "base_model_relation": "adapter",
        "license": None,
        "language": None,
        "datasets": [data.partition(":")[0]] if _is_on_the_hub(data) else None,
        "data": _data(data, sequences, args.max_length),
        "procedure": {name: value for name, value in procedure.items() if value},
        "evaluated_on": None,
    }


def hardware(args: "DSpineTrainingArguments") -> str:
    """What this run computes on."""
    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type.upper()
    return f"{args.world_size} x {name}" if args.world_size > 1 else name


def _base_model(target: str | None) -> str | None:
    """The target's name on the Hub; None for a folder or a file, whose name says nothing of that."""
    if target is None:
        return TARGET_HUB_NAME
    here = Path(target).expanduser().exists() or target.endswith(".gguf")
    return None if here or target.startswith(("/", ".", "~")) else target


def _is_on_the_hub(data: str) -> bool:
    return not Path(data).expanduser().exists() and Path(data).suffix not in (*LINES, ".parquet")


def _data(data: str, sequences: int, max_length: int) -> str:
    name = data if _is_on_the_hub(data) else name_of(data)
    text = f"{sequences:,} sequences of a prompt and a response from `{name}`, cut to {max_length:,} tokens each"
    source = Path(data).expanduser() / "regenerate.json"
    if not source.is_file():
        return f"{text}."
    made = read_json(source)
    prompts = [f"`{name_of(prompt)}`" for prompt in made.get("prompts", [])]
    prompts += [f"{made['self_prompts']:,} that the target wrote itself"] if made.get("self_prompts") else []
    temperatures = " and ".join(f"{t:g}" for t in made["temperature"])
    return (
        f"{text}. The responses are the target's own, at T = {temperatures}, of at most {made['max_new_tokens']:,} "
        f"tokens; prompts: {', '.join(prompts)}."
    )


def _steps(args: "DSpineTrainingArguments", state: "TrainerState") -> str:
    return f"{state.global_step:,} of {args.whole_batch:,} sequences x {args.anchors_per_sequence} blocks"


def _kept(args: "DSpineTrainingArguments", state: "TrainerState") -> str | None:
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return None
    step = checkpoint_step(state.best_model_checkpoint)
    measure = str(args.metric_for_best_model).removeprefix("eval_").replace("_", " ")
    return f"the checkpoint of step {step:,}, the best by {measure} on sequences that were held out"


def _loss(args: "DSpineTrainingArguments") -> str:
    text = f"{args.loss_unary:g} unary + {args.loss_conditional:g} conditional token loss"
    text += f", {args.loss_layer:g} layer-wise {args.layer_loss}" if args.loss_layer else ""
    if args.distill:
        text += (
            f"; {args.distill:g} of the token losses is cross-entropy to the target's softmax at temperature "
            f"{args.teacher_temperature:g}"
        )
    return text + (f"; {args.total_variation:g} total variation" if args.total_variation else "")


def _warmup(args: "DSpineTrainingArguments") -> str:
    """A share of the steps below 1, else a number of them."""
    return f"{args.warmup_steps:.0%} warm-up" if args.warmup_steps < 1 else f"{args.warmup_steps:g} warm-up steps"


def _precision(args: "DSpineTrainingArguments") -> str:
    kind = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    return f"{kind} autocast" if kind else "float32"


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))
