"""One process of a tensor-parallel target: python -m torch.distributed.run ... tensor_parallel_run.py FOLDER OUT."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

import dspine_hf


def texts(target, drafter, prompts: list[list[int]]) -> list[dict]:
    """Every prompt plainly, drafted (first in inference mode) and in the fast loop, greedy; and what was accepted."""
    found = []
    for prompt in prompts:
        options = {"do_sample": False, "max_new_tokens": 24, "attention_mask": torch.ones(1, len(prompt)).long()}
        ids = torch.tensor([prompt])
        row = {"plain": target.generate(ids, **options).tolist()}
        with torch.inference_mode():
            row["in inference mode"] = target.generate(ids, **options, assistant_model=drafter).tolist()
        row["drafted"] = target.generate(ids, **options, assistant_model=drafter).tolist()
        row["accepted"] = drafter.generation_stats.accepted
        row["loop"] = dspine_hf.generate(target, drafter, ids, **options).tolist()
        found.append(row)
    return found


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    placing = {"tp_plan": "auto"} if len(sys.argv) < 4 else {}
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32, **placing).eval()
    drafter = AutoModel.from_pretrained(folder / "drafter", dtype=torch.float32).eval()
    shared_out = hasattr(target.get_output_embeddings().weight, "full_tensor")
    prompts = json.loads((folder / "prompts.json").read_text())
    result = {"shared_out": shared_out, "texts": texts(target, drafter, prompts)}
    result["may train"] = not drafter.bind_target(target).head_weight.is_inference()
    out.with_suffix(f".{os.environ.get('RANK', 0)}").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
