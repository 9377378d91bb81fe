"""Measure a drafter on a few prompts: acceptance length with its interval, acceptance by slot, and speed-up.

    python examples/evaluate.py --prompts prompts.jsonl

`dspine eval` does the same for whole benchmarks, resumable, with tables and pictures.
"""

import argparse
import json

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dspine_hf  # noqa: F401  (lets AutoModel know what a DSpine drafter is)
from dspine_hf.benchmarks import encode_chat, user
from dspine_hf.evaluation import Evaluator, summarise_benchmark

PROMPTS = ["What is a prime number?", "Name three rivers.", "Add 17 and 25.", "Write a haiku about the sea."]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--drafter", default="dspine-hf/dspine-smollm2-135m-instruct")
parser.add_argument("--prompts", help="JSONL with 'prompt'; default: four prompts, to see it run")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--temperature", type=float, default=0.0)


def main() -> None:
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = AutoModel.from_pretrained(args.drafter, dtype=target.dtype).to(device).eval()
    texts = [json.loads(line)["prompt"] for line in open(args.prompts)] if args.prompts else PROMPTS
    prompts = [encode_chat(tokenizer, [user(text)]) for text in texts]

    evaluator = Evaluator(target, drafter, args.max_new_tokens)
    evaluator.warm_up(prompts[0])
    records = [
        evaluator.loop(prompt, args.temperature, seed=i, drafted_first=i % 2 == 1) for i, prompt in enumerate(prompts)
    ]
    figures = summarise_benchmark(records)
    low, high = figures["acceptance_length_interval"]
    print(f"acceptance length {figures['acceptance_length']:.2f} (95 %: {low:.2f} to {high:.2f})")
    print(f"speed-up {figures['speedup']:.2f}x, {figures['tokens_per_second_drafted']:.1f} tokens/s")
    print("acceptance by slot:", " ".join(f"{share:.2f}" for share in figures["slot_acceptance"]))
    if "identical" in figures:
        print(f"the same text as without the drafter: {figures['identical']:.0%} of the answers")


if __name__ == "__main__":
    main()
