"""The prompts that a drafter is measured on: a file per benchmark, in the chat template, after a context if wanted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sources import read_rows

SLACK = 16  # tokens by which a long prompt may miss its length: text that is cut and joined is tokenised anew


@dataclass
class Benchmark:
    """A named set of prompts as token ids. `continuations`: the target's greedy text, where it is known already."""

    name: str
    prompts: list[list[int]]
    continuations: list[list[int]] | None = None


def load_benchmarks(
    sources: list[str],
    tokenizer: Any,
    limit: int | None = None,
    thinking: bool | None = None,
    max_prompt_tokens: int | None = None,
    context_tokens: int | None = None,
    reachable: Mapping[str, bool] | None = None,
) -> list[Benchmark]:
    """Read prompt sets. A folder stands for the `.jsonl` files in it, a file for a benchmark of its name.

    Args:
        sources: files or folders of rows with "turns" or "messages" (the first user turn is asked), or of rows
            {"benchmark", "prompt_ids", "greedy_ids"} with known greedy continuations.
        limit: the first so many prompts of each set. max_prompt_tokens: longer prompts are left out.
        context_tokens: put other prompts of the set before each question, so that a prompt has about this many tokens.
            The set is then named NAME@TOKENS.
        reachable: by file, as in [`sources.read_rows`].

    Raises:
        FileNotFoundError: nothing is there. ValueError: a row holds no prompt, a set ends up empty, or context is
            asked for before prompts whose continuations are known.
    """
    files = prompt_files(sources)
    sets: dict[str, Benchmark] = {}
    for file in files:
        rows = list(read_rows(file, reachable=(reachable or {}).get(file)))
        if rows and "prompt_ids" in rows[0]:
            if context_tokens:
                raise ValueError(f"expected text prompts with a context length; {file} holds token ids. Leave it out.")
            for row in rows:
                mine = sets.setdefault(row["benchmark"], Benchmark(row["benchmark"], [], []))
                mine.prompts.append(row["prompt_ids"])
                if mine.continuations is not None:
                    mine.continuations.append(row["greedy_ids"])
            continue
        name = Path(file).stem + (f"@{context_tokens}" if context_tokens else "")
        questions = [question(row, file) for row in rows]
        if context_tokens:
            encoded = [long_prompt(questions, i, tokenizer, context_tokens, thinking) for i in range(len(questions))]
        else:
            encoded = [encode_chat(tokenizer, [user(text)], thinking) for text in questions]
        sets[name] = Benchmark(name, [p for p in encoded if not max_prompt_tokens or len(p) <= max_prompt_tokens])
    for benchmark in sets.values():
        if not benchmark.prompts:
            raise ValueError(
                f"expected prompts of at most {max_prompt_tokens} tokens in '{benchmark.name}'; found none."
            )
        benchmark.prompts = benchmark.prompts[:limit]
        if benchmark.continuations is not None:
            benchmark.continuations = benchmark.continuations[:limit]
    return list(sets.values())


def within_positions(lengths: list[int], config: Any, max_new_tokens: int) -> list[int]:
    """The context lengths that leave a target room to answer; longer ones are cut to the longest that does.

    Args:
        lengths: in tokens. config: the target's. max_new_tokens: length of an answer.

    Raises:
        ValueError: an answer alone fills all positions.
    """
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        return list(dict.fromkeys(lengths))
    room = limit - max_new_tokens - SLACK
    if room < 1:
        raise ValueError(f"expected max_new_tokens below the target's {limit} positions; found {max_new_tokens}.")
    return list(dict.fromkeys(min(length, room) for length in lengths))


def question(row: dict[str, Any], source: str = "the prompts") -> str:
    """The first user turn of a row. Raises ValueError when it has none."""
    if row.get("turns"):
        return row["turns"][0]
    for message in row.get("messages") or ():
        if message["role"] == "user":
            return message["content"]
    for name in ("prompt", "question", "instruction"):
        if isinstance(row.get(name), str):
            return row[name]
    raise ValueError(f"expected 'turns', 'messages' or 'prompt' in every row of {source}; found {sorted(row)}.")


def user(text: str) -> dict[str, str]:
    """One user message."""
    return {"role": "user", "content": text}


def encode_chat(tokenizer: Any, messages: list[dict[str, str]], thinking: bool | None = None) -> list[int]:
    """Token ids of a conversation up to where the target answers; the bare last text without a chat template."""
    if not tokenizer.chat_template:
        return tokenizer(messages[-1]["content"])["input_ids"]
    options = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def long_prompt(
    questions: list[str], index: int, tokenizer: Any, tokens: int, thinking: bool | None = None
) -> list[int]:
    """Question `index` behind the other questions of its set as context, about `tokens` long in all."""
    bare = len(encode_chat(tokenizer, [user(questions[index])], thinking))
    wanted = tokens - bare
    if wanted <= 0:
        return encode_chat(tokenizer, [user(questions[index])], thinking)
    others = "\n\n".join(questions[index + 1 :] + questions[:index]) or questions[index]
    filler = tokenizer(others, add_special_tokens=False)["input_ids"]
    filler = (filler * (wanted // max(1, len(filler)) + 1))[:wanted]
    text = tokenizer.decode(filler) + "\n\n" + questions[index]
    return encode_chat(tokenizer, [user(text)], thinking)


def prompt_files(sources: list[str]) -> list[str]:
    """What to read: each source itself, or the `.jsonl` files of a folder. FileNotFoundError if it holds none."""
    return [file for source in sources for file in _files(source)]


def _files(source: str) -> list[str]:
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "dataset_info.json").exists():
        files = sorted(str(file) for file in path.glob("*.jsonl"))
        if not files:
            raise FileNotFoundError(f"expected .jsonl files in the folder '{source}'; found none. Check the path.")
        return files
    return [str(source)]
