"""Speed and memory of training a drafter for a target of given shapes, with random weights: nothing is downloaded.

    python examples/dry_run.py --shapes qwen3-8b --sequences 4 --anchors 64 --length 2048 --steps 10 --out dry-run.json

Runs DSpineTrainer's own steps on random tokens. The JSON holds the peak memory (both models, gradients and optimiser),
the median time of a step and of the frozen target's pass in it, and the MFU: see `dspine_hf.flops.step_flops`.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from dspine_hf import DSpineDraftModel
from dspine_hf.flops import peak_tflops, step_flops
from dspine_hf.sequences import TokenSequences
from dspine_hf.training import DSpineTrainer, DSpineTrainingArguments

NAMES = ("hidden_size", "num_hidden_layers", "intermediate_size", "head_dim", "vocab_size", "tie_word_embeddings")
SHAPES = {
    "qwen3-8b": (4096, 36, 12288, 128, 151936, False),
    "qwen3-4b": (2560, 36, 9728, 128, 151936, True),
    "tiny": (32, 6, 48, 8, 199, False),
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--shapes", choices=SHAPES, required=True)
for name, value in (("sequences", 4), ("anchors", 64), ("length", 2048), ("steps", 10), ("warm-up", 3)):
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--config", default='{"block_size": 16}', help="JSON: fields of the drafter's config")
parser.add_argument("--training", default="{}", help="JSON: fields of DSpineTrainingArguments")
parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak (H200: 989); default: by the GPU's name")
parser.add_argument("--out", type=Path, default=Path("dry-run.json"))


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    """The time of every step, and of the frozen target's pass alone, which runs once more after each step."""

    def __init__(self, reader, tokens):
        self.reader, self.tokens, self.steps, self.target = reader, tokens, [], []

    def on_step_begin(self, *args, **kwargs):
        self.started = now()

    def on_step_end(self, *args, **kwargs):
        self.steps.append(now() - self.started)
        self.on_step_begin()
        self.reader(self.tokens)
        self.target.append(now() - self.started)


def main() -> None:
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    shapes = dict(zip(NAMES, SHAPES[args.shapes], strict=True))
    config = AutoConfig.for_model("qwen3", num_attention_heads=32, num_key_value_heads=8, **shapes)
    with torch.device("cuda" if cuda else "cpu"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
        tokens = torch.randint(target.config.vocab_size, (args.sequences, args.length))
    drafter = DSpineDraftModel.for_target(target, **json.loads(args.config)).float().to(tokens.device)
    rows = [{"tokens": row, "prompt_length": args.length // 4} for row in tokens.tolist()]
    arguments = {"save_strategy": "no", "use_cpu": not cuda, "bf16": cuda, "logging_steps": 1000, "disable_tqdm": True}
    arguments |= {"max_steps": args.steps + args.warm_up, "per_device_train_batch_size": args.sequences}
    arguments |= {"anchors_per_sequence": args.anchors, "max_length": args.length, **json.loads(args.training)}
    settings = DSpineTrainingArguments(str(args.out.parent), **arguments)
    trainer = DSpineTrainer(drafter, target, settings, train_dataset=TokenSequences(rows, args.length))
    trainer.add_callback(clock := Clock(trainer.reader, tokens))
    trainer.train()
    step, alone = (statistics.median(times[args.warm_up :]) for times in (clock.steps, clock.target))
    flops = step_flops(target, drafter.config, settings.loss_weights, args.sequences, args.length, args.anchors)
    peak = args.peak_tflops or peak_tflops(tokens.device)
    result = {
        **{k: v for k, v in vars(args).items() if k not in ("out", "peak_tflops")},
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "parameters": drafter.num_parameters(),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "step_seconds": round(step, 4),
        "target_forward_seconds": round(alone, 4),
        "tokens_per_second": round(args.sequences * args.length / step, 1),
        "blocks_per_second": round(args.sequences * args.anchors / step, 1),
        "flops_of_a_step": {**vars(flops), "total": flops.total},
        "mfu": round(flops.total / step / peak / 1e12, 4) if peak else None,
    }
    print(text := json.dumps(result, indent=1))
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
