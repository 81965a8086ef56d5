"""The command line: flags and help, environment, exit codes, and whole runs of `generate`."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest

import k26jax
from k26jax import LLM, SamplingParams
from k26jax.cli import Parser, build_parser, main, run_command
from k26jax.commands import generate
from k26jax.commands.terminal import Startup
from k26jax.config import EngineConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("K26JAX_"):
            monkeypatch.delenv(name)


def flags_of(command: str) -> dict[str, argparse.Action]:
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return {flag: action for action in actions for flag in action.option_strings}


def test_145_help_and_version_import_no_jax():
    code = (
        "import sys, k26jax.cli as c\n"
        "assert [c.main(a) for a in (['generate', '--help'], ['--version'], ['x'])] == [0, 0, 2]\n"
        "assert not {'jax', 'flax'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--speculative-ddtree-budget" in done.stdout
    assert f"k26jax {k26jax.__version__}\n" in done.stdout


def test_every_option_is_a_flag_with_help_and_default():
    flags = flags_of("generate")
    for item in fields(EngineConfig):
        action = flags["--" + item.name.replace("_", "-")]
        assert item.metadata["help"] in action.help
        if item.default not in (None, ""):
            assert f"default: {item.default}" in action.help
        for alias in item.metadata.get("aliases", []):
            assert flags[alias] is action
    assert all(action.help for action in flags.values())
    defaults = {item.name: item.default for item in fields(SamplingParams)}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert flags["--" + name.replace("_", "-")].default == defaults[name]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "x", "--modle-path", "y"], "did you mean '--model-path'"),
        (["generate", "x", "--max-model-length=64k"], "did you mean '--max-model-len'"),
        (["generate", "x", "--temp", "1"], "--temp"),
        (["generate", "x", "y"], "unrecognized arguments: y"),
        (["inspect", "x", "--jsno"], "did you mean '--json'"),
        (["generat", "x"], "did you mean 'generate'"),
        (["generate", "x", "--dtype", "bfloat"], "did you mean 'bfloat16'"),
        (["generate", "x", "--seed", "one"], "--seed"),
        (["generate", "x", "--context-length", "4kb"], "4kb"),
        (["generate", "x"], "--model-path FOLDER or K26JAX_MODEL_PATH"),
        (["generate", "x", "--model", "m", "--temperature", "-1"], "temperature = -1"),
        (["generate", "x", "--model", "m", "--max-tokens", "0"], "max_tokens = 0"),
        (["generate", "x", "--model", "m", "--ddtree-budget", "255"], "speculative_ddtree_budget"),
        (["generate", "x", "--model", "m", "--speculative-algorithm", "ddtre"], "mean 'DDTREE'"),
        (["generate", "x", "--model", "m", "--speculative-algorithm", "ddtree"], "draft_model"),
        (["generate", "x", "--model", "m", "--compare-plain"], "compares with a drafter"),
        (["generate", "x", "--model", "m", "--prompt-file", "f"], "both given"),
        (["generate", "--model", "m", "--prompt-file", "none.txt"], "none.txt"),
        ([], "COMMAND"),
    ],
)
def test_145_wrong_usage_exits_with_2_and_names_the_thing(argv, words, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""


def test_what_a_command_raises_becomes_an_exit_code(small_pair, tmp_path, capsys):
    def code(error):
        def run(args):
            raise error

        parser = Parser(prog="tool")
        parser.set_defaults(run=run)
        return run_command(parser, [])

    assert code(KeyboardInterrupt()) == 130
    assert code(k26jax.errors.CapacityError("big")) == 4
    assert code(k26jax.errors.CheckpointError("bad")) == 3
    assert code(RuntimeError("RESOURCE_EXHAUSTED: 5 GB\nmore")) == 4
    assert code(OSError(28, "No space left on device")) == 1
    err = capsys.readouterr().err
    assert "tool: interrupted\ntool: big\ntool: bad\ntool: out of memory" in err
    assert err.endswith("No space left on device\n")
    with pytest.raises(RuntimeError, match="other"):
        code(RuntimeError("other"))
    model = ["generate", "x", "--model-path", str(small_pair.target)]
    assert main([*model, "--context-length", "1000m"]) == 4
    assert main(["generate", "x", "--model-path", str(tmp_path)]) == 3


def test_a_prompt_that_cannot_run_is_refused_before_the_weights_are_read(
    small_pair, tmp_path, capsys, monkeypatch
):
    """The folder has no weights: whoever asked for them would say so."""
    folder = tmp_path / "model"
    shutil.copytree(small_pair.target, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    flags = ["--model-path", str(folder), "--context-length", "16"]
    too_long = small_pair.letters[0] * 17
    for argv, words in (
        ([""], "prompt is empty"),
        ([too_long], "17 tokens and the context 16"),
        (["a", "--stop-token-id", "99999"], "token id 99999"),
        (["a", "--max-tokens", "0"], "max_tokens = 0"),
    ):
        assert main(["generate", *argv, *flags]) == 2
        assert words in capsys.readouterr().err
    assert main(["generate", "a", *flags]) == 3
    assert "no *.safetensors" in capsys.readouterr().err


def test_a_prompt_that_is_not_utf8_is_refused_wherever_it_comes_from(tmp_path, capsys, monkeypatch):
    raw = b"caf\xe9"
    (tmp_path / "prompt").write_bytes(raw)
    stdin = io.TextIOWrapper(io.BytesIO(raw), errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)
    for argv, name in (
        ([os.fsdecode(raw)], "the command line"),
        (["\ud83d"], "the command line"),
        (["--prompt-file", str(tmp_path / "prompt")], str(tmp_path / "prompt")),
        (["-"], "standard input"),
    ):
        assert main(["generate", *argv, "--model-path", "m"]) == 2
        assert f"prompt from {name} is not UTF-8 text" in capsys.readouterr().err


def test_133_a_size_that_does_not_fit_exits_with_4(small_pair, capsys, monkeypatch):
    flags = [*small_pair.flags, "--max-running-requests", "4096"]
    monkeypatch.setattr("k26jax.engine.memory.available_bytes", lambda *_: 1 << 20)
    assert main(["generate", "a", *flags]) == 4
    err = capsys.readouterr().err
    assert "1 MB are available; lower --max-running-requests (now 4096)" in err


def test_a_warning_is_one_line(capsys):
    def run(args):
        warnings.warn("nothing is kept", stacklevel=1)
        return 0

    parser = Parser(prog="tool")
    parser.set_defaults(run=run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_command(parser, []) == 0
    assert capsys.readouterr().err == "tool: warning: nothing is kept\n"


def test_a_closed_pipe_ends_quietly(small_pair):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "k26jax", "inspect", str(small_pair.target)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("phase", ["on_load", "on_compile"])
def test_an_error_during_start_up_stands_on_its_own_line(phase, capsys, monkeypatch):
    def run(args):
        with Startup() as startup:
            startup.on_load("target", 1, 2_000_000)
            if phase == "on_compile":
                startup.on_compile("steps")
            raise k26jax.errors.CapacityError("big")

    parser = Parser(prog="tool")
    parser.set_defaults(run=run)
    for on_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda tty=on_terminal: tty)
        assert run_command(parser, []) == 4
        err = capsys.readouterr().err
        assert err.replace("\r", "\n").endswith("\ntool: big\n") or err == "tool: big\n"
        assert "\n\n" not in err


def test_ctrl_c_in_the_text_ends_its_line(capsys, monkeypatch):
    def chunks():
        yield SimpleNamespace(text="some", output=None)
        raise KeyboardInterrupt

    llm = SimpleNamespace(
        stream=lambda *_, **__: chunks(),
        engine=SimpleNamespace(loaded=SimpleNamespace(tokenizer=None)),
    )
    args = argparse.Namespace(json=False, show_trees=False)
    with pytest.raises(KeyboardInterrupt):
        generate._stream(llm, "x", SamplingParams(), args)
    assert capsys.readouterr() == ("some", "\n")


def test_start_up_says_each_phase_with_its_time(capsys):
    startup = Startup()
    for done in (10, 30):
        startup.on_load("drafter", done * 1_000_000, 40_000_000)
    startup.on_load("target", 1, 2_000_000)
    startup.on_compile("steps")
    startup.ready("NONE")
    out, err = capsys.readouterr()
    lines = [line.split(" in ")[0].split("...")[0] for line in err.splitlines()]
    assert lines == ["load drafter: 40.0 MB", "load target: 2.0 MB", "compile steps ", "ready"]
    assert err.endswith(" s: NONE\n")
    assert out == ""


@pytest.fixture(scope="module")
def plain(small_pair, compile_cache):
    """Plain decoding through the Python API; what every run of the command must give."""
    options = small_pair.options | {"speculative_algorithm": "NONE"}
    with LLM(**options) as llm:
        yield llm


def run_generate(small_pair, capsys, *argv: str, code: int = 0) -> tuple[str, str]:
    assert main(["generate", *argv, *small_pair.flags]) == code
    return capsys.readouterr()


def test_the_prompt_comes_from_a_file_and_text_alone_goes_to_stdout(
    small_pair, plain, capsys, tmp_path
):
    prompt = small_pair.letters[:4]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=None)
    output = plain.generate(prompt, params)[0].outputs[0]
    assert small_pair.decode(output.token_ids) == output.text
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + prompt.encode())
    greedy = ("--temperature", "0", "--max-tokens", "30", "--ignore-eos")
    out, err = run_generate(small_pair, capsys, "--prompt-file", str(file), *greedy)
    assert out == output.text + "\n"
    assert "30 tokens (length)" in err
    assert "ready in" in err
    rate, forwards = re.search(r"([\d.]+) tokens per target forward \((\d+) forw", err).groups()
    assert rate == f"{29 / int(forwards):.2f}"
    assert int(forwards) < output.metrics.target_forwards == 29


def test_standard_input_sampling_and_trees(small_pair, plain, capsys, monkeypatch):
    """Seeded sampling; the trees of the JSON object are those that are drawn."""
    prompt = small_pair.letters[2:7]
    params = SamplingParams(seed=11, top_k=6, max_tokens=24, stop=["zz"], ignore_eos=True)
    output = plain.generate(prompt, params)[0].outputs[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    sampled = ("--seed", "11", "--top-k", "6", "--max-tokens", "24", "--stop", "zz", "--ignore-eos")
    shown = ("--show-trees", "--compare-plain", "--json")
    out, err = run_generate(small_pair, capsys, "-", *sampled, *shown)
    record = json.loads(out)
    assert record["token_ids"] == output.token_ids
    assert (record["text"], record["finish_reason"]) == (output.text, "length")
    usage = record["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 24)
    assert record["compare_plain"]["same_tokens"] is True
    assert record["compare_plain"]["plain_token_ids"] == output.token_ids
    assert "same tokens: yes" in err
    steps = record["steps"]
    assert len(steps) == record["metrics"]["target_forwards"]
    assert err.count("●") == sum(len(step["path"]) for step in steps)
    assert err.count("○") == sum(len(step["token_ids"]) - len(step["path"]) for step in steps)
    # A step's root is the newest token; its path is what the text goes on with.
    place = 0
    for step in steps:
        path = [step["token_ids"][node] for node in step["path"]]
        expected = record["token_ids"][place : place + len(path)]
        assert path[: len(expected)] == expected
        place += len(path)
    assert any(len(step["path"]) > 1 for step in steps)


def test_other_tokens_than_plain_decodings_exit_with_1(capsys):
    """Fakes: what is compared is the shown run, a drafted and a plain one."""

    class Fake:
        def __init__(self, token_ids):
            self.token_ids, self.config = token_ids, EngineConfig("m")

        def generate(self, prompt, params, raise_on_error):
            metrics = SimpleNamespace(
                tokens_per_second=float(len(self.token_ids)), target_forwards=2
            )
            return [SimpleNamespace(outputs=[output(self.token_ids, metrics)])]

        def without_drafter(self, on_compile):
            return self.plain

        def shutdown(self):
            pass

    def output(token_ids, metrics=None):
        return SimpleNamespace(token_ids=token_ids, metrics=metrics)

    for shown, drafted, alone in (([1], [1], [2]), ([1], [2], [1]), ([2], [1], [1])):
        llm = Fake(drafted)
        llm.plain = Fake(alone)
        same, record = generate._compare(llm, "x", SamplingParams(), output(shown))
        assert (same, record["same_tokens"]) == (False, False)
        assert "same tokens: no" in capsys.readouterr().err
    llm = Fake([1, 2, 3])
    llm.plain = Fake([1, 2, 3])
    assert generate._compare(llm, "x", SamplingParams(), output([1, 2, 3]))[0] is True
    assert "speed over plain decoding: 1.00 times" in capsys.readouterr().err


def test_145_every_flag_of_every_command_has_help_with_its_default():
    for command in ("generate", "serve", "batch", "convert", "verify", "inspect", "plan", "doctor"):
        for flag, action in flags_of(command).items():
            assert action.help, (command, flag)
            plain = (None, False, argparse.SUPPRESS, "", [], ())
            if action.default not in plain and action.nargs != 0:
                assert "default" in action.help, (command, flag, action.default)


def test_145_a_size_that_does_not_divide_is_named_with_what_does(small_pair, capsys):
    assert main(["generate", "a", *small_pair.flags, "--tp-size", "3"]) == 3
    err = capsys.readouterr().err
    assert "cannot be shared evenly by 3 ranks" in err
    assert "--tp-size can be 1 here" in err
