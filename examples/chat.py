"""A chat that streams its answers, token by token, as they are drafted and verified.

python examples/chat.py            # an empty line ends it
"""

import argparse

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TextStreamer

import dspine_hf  # noqa: F401  (lets AutoModel know what a DSpine drafter is)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--drafter", default="dspine-hf/dspine-smollm2-135m-instruct")
parser.add_argument("--max-new-tokens", type=int, default=256)
parser.add_argument("--temperature", type=float, default=0.7)


def user_turns():
    """What the user types, up to an empty line."""
    while True:
        try:
            text = input("you> ").strip()
        except EOFError:
            return
        if not text:
            return
        yield text


def main() -> None:
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    drafter = AutoModel.from_pretrained(args.drafter, dtype=model.dtype).to(device).eval()

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    for text in user_turns():
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(device)
        out = model.generate(
            **inputs,
            assistant_model=drafter,
            streamer=streamer,
            do_sample=args.temperature > 0,
            temperature=args.temperature or None,
            max_new_tokens=args.max_new_tokens,
        )
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        stats = drafter.generation_stats
        print(f"[{stats.new_tokens} tokens, {stats.acceptance_length:.2f} per pass of the target]")


if __name__ == "__main__":
    main()
