"""Train a drafter: the target answers prompts, and the drafter learns to draft those answers.

    python examples/train.py --prompts prompts.jsonl --steps 2000 --output my-drafter

Each line of the prompts is an object with "prompt". `dspine regenerate` and `dspine train` do the same for large data,
resumable and on several devices.
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hf import DSpineDraftModel
from dspine_hf.benchmarks import encode_chat, user
from dspine_hf.responses import respond
from dspine_hf.sequences import TokenSequences, token_counts
from dspine_hf.training import DSpineTrainer, DSpineTrainingArguments

PROMPTS = ["What is a prime number?", "Name three rivers.", "Add 17 and 25.", "Write a haiku about the sea."]
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--prompts", help="JSONL with 'prompt'; default: four prompts, to see it run")
parser.add_argument("--output", default="my-drafter")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--max-new-tokens", type=int, default=48)


def main() -> None:
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts = [json.loads(line)["prompt"] for line in open(args.prompts)] if args.prompts else PROMPTS
    prompts = [encode_chat(tokenizer, [user(text)]) for text in texts]
    rows = []
    for start in range(0, len(prompts), 32):
        batch = prompts[start : start + 32]
        for prompt, response in zip(batch, respond(target, batch, args.max_new_tokens), strict=True):
            rows.append({"tokens": prompt + response.tokens, "prompt_length": len(prompt)})
    print(f"{len(rows)} sequences, {sum(len(row['tokens']) for row in rows)} tokens")

    counts = token_counts(rows, target.get_output_embeddings().weight.shape[0])
    drafter = DSpineDraftModel.for_target(
        target, counts, block_size=8, injection_placement="mlp", rewrite_layers=4
    ).float()  # fmt: skip
    arguments = DSpineTrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=min(32, len(rows)),
        anchors_per_sequence=16,
        learning_rate=2e-3,
        optim_drafter="muon",
        distill=0.7,
        bf16=device == "cuda",
        logging_steps=1,
        save_strategy="no",
    )
    trainer = DSpineTrainer(drafter.to(device), target, arguments, train_dataset=TokenSequences(rows, 1024))
    trainer.train()
    trainer.save_drafter(args.output, torch.bfloat16)
    print(f"The drafter is in {args.output}.")


if __name__ == "__main__":
    main()
