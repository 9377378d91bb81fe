"""DSpine inside vLLM against no speculation and against a DFlash drafter: same text, acceptance, tokens per second.

dspine export org/dspine-qwen3-8b drafter
python examples/bench_serving.py --target Qwen/Qwen3-8B --drafter drafter --dflash z-lab/Qwen3-8B-DFlash \
    --prompts prompts.jsonl --output serving.json

Each engine runs in a process of its own, and answers the prompts at every concurrency; the first batch of each comes
twice, once to warm up.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that merges two sorted lists.",
    "A train travels 60 km in 45 minutes. What is its speed?",
    "Summarise the water cycle in three sentences.",
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", required=True)
parser.add_argument("--drafter", help="Folder of a DSpine drafter, exported.")
parser.add_argument("--dflash", help="A DFlash drafter of the same target, as baseline.")
parser.add_argument("--prompts", type=Path, help='JSON lines, each {"turns": [question, ...]} or {"prompt": ...}.')
parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
parser.add_argument("--max-tokens", type=int, default=256)
parser.add_argument("--max-model-len", type=int, default=4096)
parser.add_argument("--dtype", default="auto")
parser.add_argument("--eager", action="store_true", help="No graphs (a CPU has none).")
parser.add_argument("--options", type=json.loads, default={}, help="Further arguments of vllm.LLM, as JSON.")
parser.add_argument("--output", type=Path, default=Path("serving.json"))
parser.add_argument("--only", help=argparse.SUPPRESS)  # the engine of this process


def read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return PROMPTS
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]


def speculative(name: str, args: argparse.Namespace) -> dict | None:
    """The speculative config of an engine; a drafter says itself how long its block is."""
    model = {"dspine": args.drafter, "dflash": args.dflash}.get(name)
    if model is None:
        return None
    from transformers import PreTrainedConfig

    block = PreTrainedConfig.get_config_dict(model)[0]["block_size"]
    return {"method": "dflash", "model": model, "num_speculative_tokens": block - 1}


def counted(engine) -> tuple[int, int]:
    """Rounds and accepted tokens so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return tuple(int(values.get(f"vllm:spec_decode_num_{what}", 0)) for what in ("drafts", "accepted_tokens"))


def measure(name: str, args: argparse.Namespace) -> list[dict]:
    """Answer the prompts at every concurrency with one engine."""
    from vllm import LLM, SamplingParams

    chats = [[{"role": "user", "content": prompt}] for prompt in read_prompts(args.prompts)]
    engine = LLM(
        args.target,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.concurrency),
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative(name, args),
        **args.options,
    )
    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    rows = []
    for width in args.concurrency:
        engine.chat(chats[:width], greedy, use_tqdm=False)
        before, start, answers = counted(engine), time.perf_counter(), []
        for i in range(0, len(chats), width):
            answers += engine.chat(chats[i : i + width], greedy, use_tqdm=False)
        seconds = time.perf_counter() - start
        texts = [list(answer.outputs[0].token_ids) for answer in answers]
        drafts, accepted = (after - old for after, old in zip(counted(engine), before, strict=True))
        rows.append(
            {
                "engine": name,
                "concurrency": width,
                "tokens": sum(map(len, texts)),
                "seconds": seconds,
                "tokens_per_second": sum(map(len, texts)) / seconds,
                "acceptance_length": 1 + accepted / drafts if drafts else 1.0,
                "texts": texts,
            }
        )
    return rows


def main() -> None:
    args = parser.parse_args()
    if args.only:
        args.output.write_text(json.dumps(measure(args.only, args)))
        return
    rows = []
    for name in ("plain", *(["dspine"] if args.drafter else []), *(["dflash"] if args.dflash else [])):
        part = args.output.with_suffix(f".{name}.json")
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name, "--output", str(part)], check=True)
        rows += json.loads(part.read_text())
    plain = {row["concurrency"]: row for row in rows if row["engine"] == "plain"}
    print(f"{'engine':8} {'requests':>8} {'tok/s':>9} {'speed-up':>8} {'acceptance':>10} {'same text':>9}")
    for row in rows:
        base = plain[row["concurrency"]]
        texts = row.pop("texts") if row is not base else row["texts"]
        row["speed_up"] = row["tokens_per_second"] / base["tokens_per_second"]
        row["same_text"] = sum(a == b for a, b in zip(texts, base["texts"], strict=True)) / len(texts)
        print(
            f"{row['engine']:8} {row['concurrency']:8d} {row['tokens_per_second']:9.1f} {row['speed_up']:8.2f} "
            f"{row['acceptance_length']:10.2f} {row['same_text']:9.2f}"
        )
    args.output.write_text(json.dumps([{k: v for k, v in row.items() if k != "texts"} for row in rows], indent=1))


if __name__ == "__main__":
    main()
