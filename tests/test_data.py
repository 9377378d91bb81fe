"""Regenerated data: what the target writes, the same after a kill, nothing lost or doubled."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
import torch

from dspine_hf.data import (
    Prompt,
    TargetWriter,
    answer_batches,
    make_batches,
    read_prompts,
    self_prompts,
    user_prefix,
    write_dataset,
)
from dspine_hf.journal import Journal
from dspine_hf.responses import SeededSampling, respond
from dspine_hf.sequences import load_sequences
from dspine_hf.server import ServerWriter, answer_from_server
from helpers.tiny_files import save_tiny_target, tiny_chat_target, tiny_tokenizer, write_jsonl
from helpers.training_runs import command, kill_when, run_here


def texts(count: int) -> list[str]:
    return [" ".join(f"w{(i * 5 + j * 11) % 58}" for j in range(2 + i % 5)) for i in range(count)]


def keyed(path) -> Journal:
    return Journal(path, {}, key=lambda entry: (entry["id"], entry["variant"]))


def test_greedy_batches_equal_one_by_one_generation():
    target = tiny_chat_target()
    prompts = [tiny_tokenizer()(text)["input_ids"] for text in texts(6)]
    batch = respond(target, prompts, 20)
    for prompt, response in zip(prompts, batch, strict=True):
        alone = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
        assert response.tokens == alone
        assert response.stopped == (alone[-1] == 3)


def test_seeded_samples_follow_the_softmax_and_depend_on_their_seed_alone():
    torch.manual_seed(0)
    logits, n = torch.randn(12) * 2, 20000
    drawn = SeededSampling(range(n), 0.7, torch.device("cpu"))(None, logits.expand(n, -1)).argmax(-1)
    expected = torch.softmax(logits / 0.7, -1) * n
    assert ((torch.bincount(drawn, minlength=12) - expected) ** 2 / expected).sum() < 31  # 11 degrees, p < 0.001
    few = SeededSampling([17, 400], 0.7, torch.device("cpu"))(None, logits.expand(2, -1)).argmax(-1)
    assert few.tolist() == drawn[[17, 400]].tolist()
    filtered = SeededSampling(range(500), 0.7, torch.device("cpu"), top_k=3)(None, logits.expand(500, -1)).argmax(-1)
    assert set(filtered.tolist()) <= set(logits.topk(3).indices.tolist())


def test_killed_regeneration_equals_an_uninterrupted_one(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    prompts = write_jsonl(
        tmp_path / "p.jsonl", [{"turns": [t, "w3 w4"][: 1 + i % 2]} for i, t in enumerate(texts(60))]
    )

    def words(folder):
        options = ["--target", target, "--dtype", "float32", "--prompts", prompts, "--max-new-tokens", 48]
        options += ["--self-prompts", 10]
        return command(
            "regenerate", *options, "--temperature", 0, "--temperature", 1, "--batch-size", 4, "--output-dir", folder
        )

    journal = tmp_path / "killed" / "responses.jsonl"
    kill_when(words(tmp_path / "killed"), lambda: journal.exists() and journal.read_bytes().count(b"\n") > 30)
    with open(journal, "ab") as file:
        file.write(b'{"id": 5, "variant": 0, "rows": [{"id"')
    run_here(words(tmp_path / "killed"))
    run_here(words(tmp_path / "whole"))
    killed, whole = (datasets.load_from_disk(str(tmp_path / name)) for name in ("killed", "whole"))
    assert killed.to_list() == whole.to_list()
    keys = [(row["id"], row["temperature"], row["turn"]) for row in whole]
    assert len(set(keys)) == len(keys) and len(keys) >= 2 * 90 and keys == sorted(keys)
    assert sum(1 for _ in open(journal)) - 1 == len({key[:2] for key in keys})
    record = json.loads((tmp_path / "whole" / "regenerate.json").read_text())
    assert record["rows"] == len(keys) and record["chat_template"] and record["enable_thinking"] is None


def test_rows_hold_the_tokens_that_the_target_wrote_and_train_reads_them(tmp_path):
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    prompts = [Prompt([text], None, "a") for text in texts(5)] + [Prompt(["w1", "w2 w3"], "w9", "b")]
    journal = keyed(tmp_path / "responses.jsonl")
    batches = make_batches(prompts, [0.0, 1.0], [len(p.turns[0]) for p in prompts], 4)
    assert sorted(job.key for batch in batches for job in batch) == [(i, v) for i in range(6) for v in range(2)]
    answer_batches(TargetWriter(target, tokenizer, 12, thinking=True), batches, journal, seed=1)
    assert write_dataset(journal, tmp_path / "out") == 14
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    for row in rows:
        prompt, response = row["tokens"][: row["prompt_length"]], row["tokens"][row["prompt_length"] :]
        asked = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, tokenize=False, enable_thinking=True
        )
        assert prompt == tokenizer(asked)["input_ids"]
        assert row["messages"][-1]["content"] == tokenizer.decode(response, skip_special_tokens=True)
        assert row["stopped"] == (response[-1] == 3) and len(response) <= 12
        if row["temperature"] == 0:
            assert respond(target, [prompt], 12)[0].tokens == response
    last = [row for row in rows if row["id"] == 5 and row["turn"] == 1][0]
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    usable = load_sequences(str(tmp_path / "out"), max_length=64)
    assert 0 < len(usable) <= 14 and usable[0]["tokens"] == rows[0]["tokens"]


def test_prompts_come_from_lines_parquet_and_data_sets(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": f"u{i}"},
                {"role": "assistant", "content": "old"},
                {"role": "user", "content": "more"},
            ]
        }
        for i in range(3)
    ]
    lines = write_jsonl(tmp_path / "a.jsonl", rows)
    found = datasets.Dataset.from_list(rows)
    found.to_parquet(str(tmp_path / "b.parquet"))
    found.save_to_disk(str(tmp_path / "c"))
    for source in (lines, tmp_path / "b.parquet", tmp_path / "c"):
        prompts = read_prompts([str(source)], limit=2)
        assert [(p.turns, p.system) for p in prompts] == [(["u0", "more"], "s"), (["u1", "more"], "s")]
    with pytest.raises(FileNotFoundError, match="nothing at"):
        read_prompts([str(tmp_path / "missing")])
    with pytest.raises(ValueError, match="a.jsonl:1: expected one JSON object"):
        (tmp_path / "a.jsonl").write_text("{oops\n")
        read_prompts([str(lines)])


def test_a_line_separator_inside_a_prompt_does_not_end_its_line(tmp_path):
    text = "one\u2028two\x85three"
    (tmp_path / "a.jsonl").write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts([str(tmp_path / "a.jsonl")])[0].turns == [text]


def test_self_prompts_are_the_targets_own_user_turns(tmp_path):
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    assert tokenizer.decode(user_prefix(tokenizer)) == "<user>"
    journal = Journal(tmp_path / "self.jsonl", {}, key=lambda entry: entry["index"])
    with torch.no_grad():
        target.get_output_embeddings().weight[3] += 0.3  # ends come soon enough
    prompts = self_prompts(target, tokenizer, 12, journal, 5, seed=3, max_new_tokens=200)
    assert 3 < len(prompts) <= 12 and len({p.turns[0] for p in prompts}) > 3
    assert all("<" not in p.turns[0] and p.source == "self" for p in prompts)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        user_prefix(tokenizer)


def test_journal_refuses_other_settings_and_drops_a_torn_line(tmp_path):
    journal = Journal(tmp_path / "j", {"seed": 1})
    journal.append({"a": 1})
    with pytest.raises(OSError, match="one process; found another"):
        Journal(tmp_path / "j", {"seed": 1})
    journal.close()
    with open(tmp_path / "j", "ab") as file:
        file.write(b'{"a": 2')
    again = Journal(tmp_path / "j", {"seed": 1})
    again.append({"a": 3})
    again.close()
    assert Journal(tmp_path / "j", {"seed": 1}).entries == [{"a": 1}, {"a": 3}]
    with pytest.raises(ValueError, match=r"begun with seed=1 \(now 2\)"):
        Journal(tmp_path / "j", {"seed": 2})
    (tmp_path / "k").write_bytes(b'{"se')
    assert Journal(tmp_path / "k", {"seed": 1}).entries == []


# ---- servers -------------------------------------------------------------------------------------------------------


class Endpoint:
    """A loopback server that answers with a function of the request; `failures` requests are refused first."""

    def __init__(self, failures: int = 0, status: int = 503):
        self.requests: list[dict] = []
        self.failures = failures
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append({"path": self.path, **body})
                if endpoint.failures:
                    endpoint.failures -= 1
                    self.send_error(status, "not now")
                    return
                words = [f"w{(body['seed'] >> shift) % 58}" for shift in range(0, 12, 3)]
                message = {"role": "assistant", "content": " ".join(words), "reasoning_content": None}
                answer = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def jobs_for(count: int):
    prompts = [Prompt([text], None, "a") for text in texts(count)]
    return [job for batch in make_batches(prompts, [0.7], [1] * count, 4) for job in batch]


def test_served_target_answers_in_order_of_keys_and_a_restart_asks_only_for_what_is_missing(tmp_path):
    jobs = jobs_for(20)
    with Endpoint() as endpoint:
        writer = ServerWriter(endpoint.url, "some-model", tiny_tokenizer(), 9, thinking=True)
        answer_from_server(writer, jobs[:8], keyed(tmp_path / "responses.jsonl"), 3, concurrency=4)
        journal = keyed(tmp_path / "responses.jsonl")
        seen = []
        answer_from_server(writer, jobs, journal, 3, concurrency=4, done=seen.append)
        assert len(endpoint.requests) == 20 and sum(seen) == 20
        request = endpoint.requests[0]
        assert request["path"] == "/v1/chat/completions" and request["model"] == "some-model"
        assert request["chat_template_kwargs"] == {"enable_thinking": True}
        assert (request["temperature"], request["max_tokens"]) == (0.7, 9)
    assert write_dataset(journal, tmp_path / "out") == 20
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert rows["id"][:] == list(range(20))
    tokenizer = tiny_tokenizer()
    for row in rows:
        words = " ".join(f"w{(row['seed'] >> shift) % 58}" for shift in range(0, 12, 3))
        assert tokenizer.decode(row["tokens"][row["prompt_length"] :]) == f"{words} <end>"


def test_busy_server_is_asked_again_and_a_refusal_is_reported(tmp_path):
    with Endpoint(failures=3) as endpoint:
        writer = ServerWriter(endpoint.url, "m", tiny_tokenizer(), 9, pause=0.01)
        answer_from_server(writer, jobs_for(2), keyed(tmp_path / "a.jsonl"), 3, concurrency=1)
        assert len(endpoint.requests) == 5
    with Endpoint(failures=1, status=400) as endpoint, pytest.raises(ValueError, match="status 400"):
        writer = ServerWriter(endpoint.url, "m", tiny_tokenizer(), 9, pause=0.01)
        answer_from_server(writer, jobs_for(2), keyed(tmp_path / "b.jsonl"), 3, concurrency=1)
    writer = ServerWriter("http://127.0.0.1:9", "m", tiny_tokenizer(), 9, retries=1, pause=0.01)
    with pytest.raises(ConnectionError, match="Is it running"):
        writer.post("chat/completions", {})


def test_regenerate_command_speaks_to_a_server(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in texts(5)])
    with Endpoint() as endpoint:
        run_here(
            command(
                "regenerate",
                "--target",
                target,
                "--server",
                endpoint.url,
                "--prompts",
                prompts,
                "--server-model",
                "served",
                "--output-dir",
                tmp_path / "out",
            )
        )
        assert {request["model"] for request in endpoint.requests} == {"served"}
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 5
