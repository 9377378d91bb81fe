"""Is drafted greedy text the plain greedy text, token by token? Every prompt that differs is listed with its near-tie.

    python examples/check_exactness.py --prompts gsm8k.jsonl humaneval.jsonl --limit 30 --max-new-tokens 32

Exact equality is expected in float32. In 16-bit dtypes a pass over several tokens rounds differently from a pass over
one, so texts may part where the two best tokens are practically tied: `gap` is the distance of their logits there.
"""

import argparse
import json
from pathlib import Path

import torch

from dspine_hf.embedded import load_embedded_target
from dspine_hf.loading import load_drafter, load_target
from dspine_hf.sources import read_jsonl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct")
parser.add_argument("--drafter", default="model_cards/dspine-smollm2-135m-instruct")
parser.add_argument("--prompts", nargs="+", required=True, help='JSONL files of {"turns": [...]} lines')
parser.add_argument("--limit", type=int, default=30, help="prompts of each file")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--output", help="write one JSON object per prompt here")


def top_gap(model, prefix: torch.Tensor) -> float:
    """Distance between the two best logits after `prefix` [1, length]."""
    with torch.no_grad():
        best = model(prefix).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def compare(model, drafter, inputs, max_new_tokens: int) -> dict:
    """One prompt both ways: whether the texts are the same, and the gap at the first token that is not."""
    options = {"do_sample": False, "max_new_tokens": max_new_tokens}
    plain = model.generate(**inputs, **options)[0]
    drafted = model.generate(**inputs, **options, assistant_model=drafter)[0]
    stats = drafter.generation_stats
    row = {"same": plain.tolist() == drafted.tolist(), "new": stats.new_tokens, "accepted": stats.accepted}
    if not row["same"]:
        pairs = enumerate(zip(plain.tolist(), drafted.tolist(), strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(drafted)))
        row["gap"] = top_gap(model, plain[None, :place])
    return row


def main() -> None:
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model, tokenizer = load_target(args.target, dtype=dtype) if args.target else load_embedded_target(dtype=dtype)
    drafter = load_drafter(args.drafter, model)
    rows = []
    for path in args.prompts:
        for index, prompt in enumerate(read_jsonl(Path(path))[: args.limit]):
            chat = [{"role": "user", "content": prompt["turns"][0]}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            rows.append({"prompts": path, "index": index, **compare(model, drafter, inputs, args.max_new_tokens)})
            if not rows[-1]["same"]:
                print("differs:", json.dumps(rows[-1]), flush=True)
    if args.output:
        Path(args.output).write_text("".join(json.dumps(row) + "\n" for row in rows))
    differing, accepted = sum(not row["same"] for row in rows), sum(row["accepted"] for row in rows)
    print(f"{len(rows)} prompts, {differing} differ; {accepted} drafted tokens were accepted")


if __name__ == "__main__":
    main()
