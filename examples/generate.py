"""One prompt, answered plain and with a drafter: the same text in fewer passes of the target.

python examples/generate.py --prompt "Why is the sky blue?"
"""

import argparse
import time

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dspine_hf  # noqa: F401  (lets AutoModel know what a DSpine drafter is)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--drafter", default="dspine-hf/dspine-smollm2-135m-instruct")
parser.add_argument("--prompt", default="Why is the sky blue?")
parser.add_argument("--max-new-tokens", type=int, default=128)


def main() -> None:
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = AutoModel.from_pretrained(args.drafter, dtype=model.dtype).to(device).eval()

    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(device)
    for assistant in (None, drafter):
        start = time.perf_counter()
        out = model.generate(**inputs, assistant_model=assistant, do_sample=False, max_new_tokens=args.max_new_tokens)
        seconds = time.perf_counter() - start
        new = out[0, inputs["input_ids"].shape[1] :]
        print(tokenizer.decode(new, skip_special_tokens=True))
        print(f"--- {'drafted' if assistant else 'plain'}: {len(new) / seconds:.1f} tokens/s\n")

    stats = drafter.generation_stats
    print(f"{stats.new_tokens} tokens in {stats.rounds} passes, {stats.acceptance_length:.2f} tokens per pass")
    print("acceptance by slot:", " ".join(f"{share:.2f}" for share in stats.slot_acceptance))


if __name__ == "__main__":
    main()
