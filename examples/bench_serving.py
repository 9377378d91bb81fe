"""DSpine inside vLLM against no speculation and against a DFlash drafter: same text, acceptance, tokens per second.

dspine export org/dspine-qwen3-8b drafter
python examples/bench_serving.py --target Qwen/Qwen3-8B --drafter drafter --dflash z-lab/Qwen3-8B-DFlash \
    --prompts prompts.jsonl --output serving.json

Each engine runs in a process of its own, and answers the prompts at every temperature and concurrency; the first batch
of each comes twice, once to warm up. A run cut short keeps what it has: each row is printed and written beside the
output, to serving.ENGINE.json, when it is measured, and the output is written after every engine. Temperature 0 alone
promises the same text as without a drafter, so that column is left out above it.
"""

import argparse
import itertools
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
parser.add_argument("--drafter", nargs="+", default=[], help="Folders of DSpine drafters, exported.")
parser.add_argument("--dflash", help="A DFlash drafter of the same target, as baseline.")
parser.add_argument("--prompts", type=Path, help='JSON lines, each {"turns": [question, ...]} or {"prompt": ...}.')
parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
parser.add_argument("--max-tokens", type=int, default=256)
parser.add_argument("--max-model-len", type=int, default=4096)
parser.add_argument("--dtype", default="auto")
parser.add_argument(
    "--draft-sample-method",
    choices=["greedy", "probabilistic"],
    default="greedy",
    help="How vLLM picks drafts above temperature 0. A DSpine drafter samples a chain if exported with --engine-walk.",
)
parser.add_argument("--eager", action="store_true", help="No graphs (a CPU has none).")
parser.add_argument("--options", type=json.loads, default={}, help="Further arguments of vllm.LLM, as JSON.")
parser.add_argument("--output", type=Path, default=Path("serving.json"))
parser.add_argument("--only", help=argparse.SUPPRESS)  # the engine of this process


def read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return PROMPTS
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]


def engines(args: argparse.Namespace) -> dict[str, str | None]:
    """Every engine by its name, with its drafter's folder; several DSpine drafters are numbered."""
    dspine = {f"dspine{i or ''}": folder for i, folder in enumerate(args.drafter)}
    return {"plain": None, **dspine, **({"dflash": args.dflash} if args.dflash else {})}


def speculative(model: str | None, sample_method: str) -> dict | None:
    """The speculative config of an engine; a drafter says itself how long its block is."""
    if model is None:
        return None
    from transformers import PreTrainedConfig

    block = PreTrainedConfig.get_config_dict(model)[0]["block_size"]
    spec = {"method": "dflash", "model": model, "num_speculative_tokens": block - 1}
    return {**spec, "draft_sample_method": sample_method}


def counted(engine) -> tuple[int, int]:
    """Rounds and accepted tokens so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return tuple(int(values.get(f"vllm:spec_decode_num_{what}", 0)) for what in ("drafts", "accepted_tokens"))


def measure(name: str, args: argparse.Namespace) -> None:
    """Answer the prompts at every concurrency and temperature with one engine, and write each row when it is there."""
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
        speculative_config=speculative(engines(args)[name], args.draft_sample_method),
        **args.options,
    )
    rows: list[dict] = []
    for temperature, width in itertools.product(args.temperature, args.concurrency):
        sampling = SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
        engine.chat(chats[:width], sampling, use_tqdm=False)
        before, start, answers = counted(engine), time.perf_counter(), []
        for i in range(0, len(chats), width):
            answers += engine.chat(chats[i : i + width], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        texts = [list(answer.outputs[0].token_ids) for answer in answers]
        drafts, accepted = (after - old for after, old in zip(counted(engine), before, strict=True))
        rows.append(
            {
                "engine": name,
                "temperature": temperature,
                "concurrency": width,
                "tokens": sum(map(len, texts)),
                "seconds": seconds,
                "tokens_per_second": sum(map(len, texts)) / seconds,
                "acceptance_length": 1 + accepted / drafts if drafts else 1.0,
                "texts": texts,
            }
        )
        print(f"{name}: { ({k: v for k, v in rows[-1].items() if k != 'texts'}) }", flush=True)
        replace(args.output, json.dumps(rows))


def replace(file: Path, text: str) -> None:
    """Write a file in one step: a reader, or a run cut short, never finds half of it."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def compared(rows: list[dict]) -> list[dict]:
    """The rows without their texts, each beside plain's of the same setting: speed_up, and same_text at T = 0."""
    plain = {(row["temperature"], row["concurrency"]): row for row in rows if row["engine"] == "plain"}
    found = []
    for row in rows:
        line = {k: v for k, v in row.items() if k != "texts"}
        base = plain.get((row["temperature"], row["concurrency"]))
        if base is not None:
            line["speed_up"] = row["tokens_per_second"] / base["tokens_per_second"]
            if row["temperature"] == 0:
                same = sum(a == b for a, b in zip(row["texts"], base["texts"], strict=True))
                line["same_text"] = same / len(row["texts"])
        found.append(line)
    return found


def table(rows: list[dict]) -> str:
    lines = [f"{'engine':8} {'T':>4} {'requests':>8} {'tok/s':>9} {'speed-up':>8} {'acceptance':>10} {'same text':>9}"]
    for row in rows:
        same, speed_up = (f"{row[key]:.2f}" if key in row else "-" for key in ("same_text", "speed_up"))
        lines.append(
            f"{row['engine']:8} {row['temperature']:4.1f} {row['concurrency']:8d} {row['tokens_per_second']:9.1f} "
            f"{speed_up:>8} {row['acceptance_length']:10.2f} {same:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    args = parser.parse_args()
    if args.only:
        measure(args.only, args)
        return
    rows: list[dict] = []
    failed = []
    for name in engines(args):
        part = args.output.with_suffix(f".{name}.json")
        part.unlink(missing_ok=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--output", str(part)]
        if subprocess.run(command).returncode:
            failed.append(name)
        if part.is_file():
            rows += json.loads(part.read_text(encoding="utf-8"))
        replace(args.output, json.dumps(compared(rows), indent=1))
    print(table(compared(rows)))
    if failed:
        raise SystemExit(f"these engines failed, see the log above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
