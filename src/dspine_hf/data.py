"""Training data: prompts from files or from the target itself, and the responses that the target writes to them."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .benchmarks import encode_chat, user
from .journal import Journal
from .responses import Response, end_ids, respond
from .saving_dspine import replaced_whole
from .seeds import hash_seed
from .sources import read_rows

MARK = "\u27e6prompt\u27e7"
SELF_PROMPT_SEED = 0x5E1F


@dataclass
class Prompt:
    """The user's side of a conversation: a system message or none, and one or more user turns."""

    turns: list[str]
    system: str | None
    source: str


@dataclass
class Job:
    """One prompt to be answered at one temperature. `id` counts prompts, `variant` temperatures."""

    id: int
    variant: int
    prompt: Prompt
    temperature: float

    @property
    def key(self) -> tuple[int, int]:
        return self.id, self.variant


@dataclass
class Reply:
    """A response: its text, its tokens with the prompt's before them, and whether it came to its end."""

    text: str
    tokens: list[int]
    prompt_length: int
    stopped: bool


class Writer(Protocol):
    """What answers conversations: the target on this machine, or a server."""

    def reply(self, chats: list[list[dict]], temperature: float, seeds: list[int]) -> list[Reply]:
        """One reply to each conversation."""
        ...


# ---- prompts -------------------------------------------------------------------------------------------------------


def read_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Prompts of JSONL or Parquet files, `datasets` folders or names, in order; at most `limit` of each source.

    Rows hold "turns", "messages" (assistant messages are dropped: the target writes its own), or "prompt".

    Raises:
        ValueError: a row holds none of these.
    """
    prompts = []
    for source in sources:
        for i, row in enumerate(read_rows(source)):
            if limit is not None and i >= limit:
                break
            prompts.append(_prompt(row, Path(str(source)).stem, source))
    return prompts


def _prompt(row: dict[str, Any], name: str, source: str) -> Prompt:
    if row.get("turns"):
        return Prompt(list(row["turns"]), None, name)
    if row.get("messages"):
        said = {role: [m["content"] for m in row["messages"] if m["role"] == role] for role in ("system", "user")}
        if said["user"]:
            return Prompt(said["user"], "\n".join(said["system"]) or None, name)
    for column in ("prompt", "question", "instruction"):
        if isinstance(row.get(column), str):
            return Prompt([row[column]], None, name)
    raise ValueError(
        f"expected 'turns', 'messages' with a user message, or 'prompt' in every row of '{source}'; found the columns "
        f"{sorted(row)}. Rename the column that holds the prompt."
    )


def user_prefix(tokenizer: Any) -> list[int]:
    """The chat template up to where a user's message begins. Raises ValueError without a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            "self-prompts need a target with a chat template; this tokenizer has none. Give prompts instead."
        )
    text = tokenizer.apply_chat_template([user(MARK)], tokenize=False)
    return tokenizer(text.split(MARK)[0], add_special_tokens=False)["input_ids"]


def self_prompts(
    target: Any,
    tokenizer: Any,
    count: int,
    journal: Journal,
    batch_size: int,
    seed: int,
    max_new_tokens: int = 256,
    done: Callable[[int], None] = lambda n: None,
) -> list[Prompt]:
    """`count` user turns that the target writes itself, sampled at T = 1; unfinished and empty ones are left out.

    The journal (keyed by "index") holds what is written already.
    """
    prefix = user_prefix(tokenizer)
    for start in range(0, count, batch_size):
        indices = list(range(start, min(start + batch_size, count)))
        if any(i not in journal.places for i in indices):
            seeds = [hash_seed(seed, SELF_PROMPT_SEED, i) for i in indices]
            written = respond(target, [prefix] * len(indices), max_new_tokens, 1.0, seeds)
            for i, response in zip(indices, written, strict=True):
                if i not in journal.places:
                    text = tokenizer.decode(response.tokens, skip_special_tokens=True).strip()
                    journal.append({"index": i, "text": text if response.stopped else ""})
        done(len(indices))
    texts = [journal.read(i)["text"] for i in range(count)]
    return [Prompt([text], None, "self") for text in texts if text]


# ---- responses -----------------------------------------------------------------------------------------------------


class TargetWriter:
    """Replies by the target itself, in one padded batch."""

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        max_new_tokens: int,
        thinking: bool | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
    ):
        self.target, self.tokenizer, self.thinking = target, tokenizer, thinking
        self.options = {"max_new_tokens": max_new_tokens, "top_k": top_k, "top_p": top_p}
        self.ends = sorted({*end_ids(target), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})

    def reply(self, chats: list[list[dict]], temperature: float, seeds: list[int]) -> list[Reply]:
        """One reply to each conversation."""
        prompts = [encode_chat(self.tokenizer, chat, self.thinking) for chat in chats]
        written: list[Response] = respond(
            self.target, prompts, temperature=temperature, seeds=seeds, eos_ids=self.ends, **self.options
        )
        return [
            Reply(self.tokenizer.decode(r.tokens, skip_special_tokens=True), [*p, *r.tokens], len(p), r.stopped)
            for p, r in zip(prompts, written, strict=True)
        ]


def answer_jobs(writer: Writer, jobs: list[Job], seed: int) -> list[dict[str, Any]]:
    """All turns of jobs of one temperature, turn by turn: one journal entry {"id", "variant", "rows"} per job."""
    chats = [[{"role": "system", "content": job.prompt.system}] if job.prompt.system else [] for job in jobs]
    entries: list[dict[str, Any]] = [{"id": job.id, "variant": job.variant, "rows": []} for job in jobs]
    for turn in range(max(len(job.prompt.turns) for job in jobs)):
        active = [i for i, job in enumerate(jobs) if len(job.prompt.turns) > turn]
        seeds = [hash_seed(seed, jobs[i].id, jobs[i].variant, turn) for i in active]
        for i in active:
            chats[i].append(user(jobs[i].prompt.turns[turn]))
        replies = writer.reply([chats[i] for i in active], jobs[0].temperature, seeds)
        for i, row_seed, reply in zip(active, seeds, replies, strict=True):
            chats[i].append({"role": "assistant", "content": reply.text})
            entries[i]["rows"].append(
                {
                    "id": jobs[i].id,
                    "turn": turn,
                    "source": jobs[i].prompt.source,
                    "messages": list(chats[i]),
                    "tokens": reply.tokens,
                    "prompt_length": reply.prompt_length,
                    "temperature": jobs[i].temperature,
                    "seed": row_seed,
                    "stopped": reply.stopped,
                }
            )
    return entries


def make_batches(
    prompts: list[Prompt], temperatures: Sequence[float], lengths: Sequence[int], batch_size: int
) -> list[list[Job]]:
    """Jobs of one temperature and similar length together; always the same for the same prompts."""
    order = sorted(range(len(prompts)), key=lambda i: (lengths[i], i))
    batches = []
    for variant, temperature in enumerate(temperatures):
        jobs = [Job(i, variant, prompts[i], temperature) for i in order]
        batches += [jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size)]
    return batches


def answer_batches(
    writer: Writer, batches: list[list[Job]], journal: Journal, seed: int, done: Callable[[int], None] = lambda n: None
) -> None:
    """Answer what the journal (keyed by id and variant) does not hold yet.

    A batch that was cut off is computed again as a whole, so that every response is what it would have been.
    """
    for batch in batches:
        missing = {job.key for job in batch if job.key not in journal.places}
        if missing:
            for entry in answer_jobs(writer, batch, seed):
                if (entry["id"], entry["variant"]) in missing:
                    journal.append(entry)
        done(len(batch))


def write_dataset(journal: Journal, folder: Path) -> int:
    """Write the journal's rows to `folder` as a data set, by prompt, temperature and turn; returns their number."""
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        for key in sorted(journal.places):
            yield from journal.read(key)["rows"]

    value, sequence = datasets.Value, datasets.List
    features = datasets.Features(
        {
            "id": value("int64"),
            "turn": value("int32"),
            "source": value("string"),
            "messages": sequence({"role": value("string"), "content": value("string")}),
            "tokens": sequence(value("int32")),
            "prompt_length": value("int32"),
            "temperature": value("float32"),
            "seed": value("int64"),
            "stopped": value("bool"),
        }
    )
    scratch = folder / ".scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with replaced_whole(folder, "state.json", re.compile(r"data-\d+-of-\d+\.arrow").fullmatch) as staging:
            found = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(scratch))
            found.save_to_disk(str(staging))
            count = len(found)
            del found
    except datasets.exceptions.DatasetGenerationError as error:
        raise OSError(f"expected to write a data set to '{folder}'; found: {error.__cause__ or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return count
