"""Adapt a trained drafter to a domain with LoRA: few weights are trained, and merged back into a plain drafter.

python examples/adapt_lora.py --prompts my-domain.jsonl --steps 300 --output my-domain-drafter
"""

import argparse
import json

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dspine_hf  # noqa: F401  (lets AutoModel know what a DSpine drafter is)
from dspine_hf.benchmarks import encode_chat, user
from dspine_hf.lora import add_lora
from dspine_hf.responses import respond
from dspine_hf.sequences import TokenSequences
from dspine_hf.training import DSpineTrainer, DSpineTrainingArguments

PROMPTS = ["Translate 'good morning' to French.", "Translate 'thank you' to Spanish.", "Translate 'tea' to German."]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--drafter", default="dspine-hf/dspine-smollm2-135m-instruct")
parser.add_argument("--prompts", help="JSONL with 'prompt'; default: three prompts, to see it run")
parser.add_argument("--output", default="my-domain-drafter")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--steps", type=int, default=4)


def main() -> None:
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts = [json.loads(line)["prompt"] for line in open(args.prompts)] if args.prompts else PROMPTS
    prompts = [encode_chat(tokenizer, [user(text)]) for text in texts]
    responses = respond(target, prompts, max_new_tokens=48)
    rows = [
        {"tokens": prompt + response.tokens, "prompt_length": len(prompt)}
        for prompt, response in zip(prompts, responses, strict=True)
    ]

    drafter = AutoModel.from_pretrained(args.drafter, dtype=torch.float32)
    drafter.check_target(target)
    add_lora(drafter, args.rank)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    print(f"training {trained:,} of {sum(p.numel() for p in drafter.parameters()):,} weights")
    arguments = DSpineTrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=min(8, len(rows)),
        anchors_per_sequence=16,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = DSpineTrainer(drafter.to(device), target, arguments, train_dataset=TokenSequences(rows, 1024))
    trainer.train()
    trainer.save_drafter(args.output, torch.bfloat16)
    print(f"The adapted drafter is in {args.output}.")


if __name__ == "__main__":
    main()
