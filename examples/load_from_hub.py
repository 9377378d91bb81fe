"""Use a published drafter where dspine-hf is not installed: its repository carries the code.

    python examples/load_from_hub.py

`trust_remote_code=True` runs code of the repository: read it first, and pin it with `revision`.
"""

import argparse

from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--drafter", default="dspine-hf/dspine-smollm2-135m-instruct")
parser.add_argument("--revision", help="commit, tag or branch of the drafter's repository")
parser.add_argument("--patch-free", action="store_true", help="leave Transformers' own classes out of it")


def main() -> None:
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = AutoModel.from_pretrained(
        args.drafter, dtype=model.dtype, revision=args.revision, trust_remote_code=True
    )  # fmt: skip
    recipe = {"custom_generate": args.drafter, "trust_remote_code": True} if args.patch_free else {}

    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=64, **recipe)
    print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"{drafter.generation_stats.acceptance_length:.2f} tokens per pass of the target")


if __name__ == "__main__":
    main()
