"""Drafted against plain generation with the target on one device, split over several, or tensor-parallel.

    python examples/split_target.py --target SmolLM2-folder --way one --out one.json
    python examples/split_target.py --target SmolLM2-folder --way map --first-device 150MB --out map.json
    torchrun --nproc_per_node 2 examples/split_target.py --target SmolLM2-folder --way tp --out tp.json

Texts are compared in float32 and timed in bfloat16 too; `--first-device` bounds what device 0 takes, so that a small
target is split at all. `--pad-heads 12` first adds attention heads of zero weight, after which the number of heads and
of key/value heads divides by the number of processes; the function stays the same.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean, median

import torch
from decode_cases import QUESTIONS, synchronise
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hf.loading import load_drafter


def pad_heads(folder: str, heads: int, out: Path) -> str:
    """A copy of the Llama target in `folder` with `heads` query heads; the new ones' weights are zero."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config.to_dict()
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads // groups, "head_dim": width}
    wide = type(model)(type(model.config)(**config)).float()
    weights = wide.state_dict()
    for name, old in model.state_dict().items():
        weights[name].zero_()[tuple(slice(n) for n in old.shape)] = old
    wide.load_state_dict(weights)
    wide.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return str(out)


def measure(target, drafter, tokenizer, new_tokens: int) -> dict:
    """Every question plainly and drafted, the second of two runs each."""
    rows, device = [], next(target.parameters()).device
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        options = {**inputs.to(device), "do_sample": False, "max_new_tokens": new_tokens}
        texts, speeds = [], []
        for more in ({}, {"assistant_model": drafter}):
            target.generate(**options, **more)
            synchronise(device.type)
            began = time.perf_counter()
            texts.append(target.generate(**options, **more))
            synchronise(device.type)
            speeds.append((texts[-1].shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - began))
        rows.append((torch.equal(*texts), drafter.generation_stats.acceptance_length, *speeds, texts[0].tolist()))
    same, lengths, plain, drafted, _ = zip(*rows, strict=True)
    found = {"identical": sum(same), "of": len(same), "acceptance": mean(lengths)}
    return found | {"tokens_per_second": {"plain": median(plain), "drafted": median(drafted)}, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a folder or Hub name")
    parser.add_argument("--drafter", default="model_cards/dspine-smollm2-135m-instruct")
    parser.add_argument("--way", choices=("one", "map", "tp"), required=True)
    parser.add_argument("--first-device", default="150MB", help="memory of device 0 for --way map")
    parser.add_argument("--pad-heads", type=int)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.pad_heads:
        args.target = pad_heads(args.target, args.pad_heads, args.out.with_suffix(f".{os.environ.get('RANK', 0)}"))
    placing = {"one": {}, "tp": {"tp_plan": "auto"}, "map": {"device_map": "auto"}}[args.way]
    if args.way == "map":
        placing["max_memory"] = {0: args.first_device, 1: "100GB"}
    tokenizer, result = AutoTokenizer.from_pretrained(args.target), {"way": args.way}
    for dtype in (torch.float32, torch.bfloat16):
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, **placing).eval()
        if args.way == "one" and torch.cuda.is_available():
            target = target.cuda()
        result["devices"] = {name: str(place) for name, place in getattr(target, "hf_device_map", {}).items()}
        result[str(dtype)[6:]] = found = measure(
            target, load_drafter(args.drafter, target), tokenizer, args.new_tokens
        )
        if not int(os.environ.get("RANK", 0)):
            print({key: value for key, value in found.items() if key != "rows"}, flush=True)
            args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
