"""Commands in README, recipe and examples that no test runs whole: each names a command and options that exist."""

import argparse
import http.server
import json
import re
import runpy
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.main import get_command

from dspine_hf.cli import app
from dspine_hf.commands.train import parse_arguments
from helpers.launch import stand_in_python

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TEXTS = [ROOT / "README.md", *EXAMPLES.glob("recipes/*.md"), *EXAMPLES.glob("*.py")]
MENTIONED = r"`((?:dspine |python examples/)[^`]+)`"
SERVERS = ("python -m vllm", "python -m sglang")


def commands(path: Path) -> list[str]:
    """The commands of a text, each in one line: of shell blocks, and of the lines that are set in by four."""
    text = path.read_text()
    if path.suffix == ".py":
        text = text.split('"""')[1]
        text = re.sub(r"^(?=python )", "    ", text, flags=re.MULTILINE)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    blocks += re.findall(r"^(?: {4}.*\n?)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    block = re.sub(r"<<'(\w+)'.*?\n\1\n", "\n", "\n".join(blocks), flags=re.DOTALL)
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    return [line.strip() for line in lines if re.match(r"\s*(dspine|python|accelerate|make) ", line)]


WRITTEN = [(path, line) for path in TEXTS for line in commands(path)]


def parsed(words: list[str], monkeypatch) -> None:
    """Parse a command as it would be, and run nothing; SystemExit or an exception of click's if it is wrong."""
    if words[0] == "dspine":
        command = get_command(app).commands[words[1]]
        context = command.make_context(words[1], words[2:])
        if words[1] == "train":
            parse_arguments([*context.args, "--use-cpu"], "out", bool(context.params["eval_size"]))
    elif words[0] == "accelerate":
        assert words[1:3] == ["launch", "--config_file"] and (ROOT / words[3]).is_file()
        start = words.index("-m")
        assert words[start + 1] == "dspine_hf.cli"
        parsed(["dspine", *words[start + 2 :]], monkeypatch)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    else:
        run_until_parsed(ROOT / words[1], words[2:], monkeypatch)


class Parsed(Exception):
    """The script has read its arguments."""


def run_until_parsed(script: Path, words: list[str], monkeypatch) -> None:
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


def usable(line: str) -> list[str]:
    """The words of a command without comment, pipes, environment or optional parts."""
    return shlex.split(re.sub(r"\[.*?\]", "", line), comments=True)


ELSEWHERE = (*SERVERS, "python -m torch")


@pytest.mark.parametrize(
    ("path", "line"),
    [(p, line) for p, line in WRITTEN if not line.startswith(ELSEWHERE)],
    ids=lambda value: value.name if isinstance(value, Path) else value[:60],
)
def test_a_written_command_is_parsed_by_what_it_names(path, line, monkeypatch):
    parsed(usable(line), monkeypatch)


def test_the_commands_are_found():
    found = [line for _, line in WRITTEN]
    for start in (
        "dspine train",
        "dspine regenerate --server",
        "accelerate launch",
        "python examples/dry_run",
        *SERVERS,
    ):
        assert any(line.startswith(start) for line in found), start


@pytest.mark.parametrize("line", ["dspine train --data x --no-such 1", "dspine eval --drafter", "dspine fly"])
def test_a_wrong_command_would_be_noticed(line, monkeypatch):
    with pytest.raises(Exception, match="no.such|requires an argument|fly"):
        parsed(usable(line), monkeypatch)


def test_commands_mentioned_in_a_sentence_exist_and_have_their_options():
    known = get_command(app).commands
    for path in TEXTS:
        for words in map(shlex.split, re.findall(MENTIONED, path.read_text())):
            if words[0] == "python":
                assert (ROOT / words[1]).is_file(), words
            elif words[1] != "COMMAND":
                options = {name for option in known[words[1]].params for name in option.opts}
                assert {word for word in words if word.startswith("--")} <= options | {"--help"}, words


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_script_of_a_server_starts_what_the_readme_starts(engine, tmp_path):
    """A stand-in for the engine's interpreter keeps the words that it is started with."""
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "config.json").write_text('{"block_size": 8}')
    environment = stand_in_python(tmp_path)
    words = ["bash", str(EXAMPLES / f"serve_{engine}.sh"), "TARGET", "serving", "--port", "9"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = [line for path, line in WRITTEN if path.name == "README.md" and line.startswith(f"python -m {engine}")]
    found, wanted = json.loads(done.stdout), [*shlex.split(line)[1:], "--port", "9"]
    if engine == "vllm":
        at = wanted.index("--speculative-config") + 1
        assert json.loads(found.pop(at)) == json.loads(wanted.pop(at))
    assert found == wanted
    none = subprocess.run(words[:3], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert none.returncode != 0 and "name the exported drafter" in none.stderr


class Server(http.server.BaseHTTPRequestHandler):
    """An OpenAI endpoint that streams the question's words back."""

    def do_GET(self):
        self.answer([b'{"data": [{"id": "some-target"}]}'])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "some-target" and body["stream"] and body["temperature"] == 0
        pieces = [{"role": "assistant"}, *({"content": f"{word} "} for word in body["messages"][0]["content"].split())]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in pieces]
        self.answer([f"data: {event}\n\n".encode() for event in (*events, '{"choices": []}', "[DONE]")])

    def answer(self, parts):
        self.send_response(200)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)

    def log_message(self, *args):
        pass


def test_the_client_prints_what_a_server_streams(monkeypatch, capsys):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1")
        monkeypatch.setattr(sys, "argv", ["client", "--url", url, "--prompt", "Why is it blue?"])
        runpy.run_path(str(EXAMPLES / "client.py"), run_name="__main__")
        server.shutdown()
    assert capsys.readouterr().out == "Why is it blue? \n"


@pytest.mark.parametrize("name", ["client.py", "serve_vllm.sh", "serve_sglang.sh"])
def test_the_examples_of_serving_are_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
