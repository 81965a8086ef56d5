"""Chats through the Python API, a command and a batch: the tokens of `generate` as messages."""

from __future__ import annotations

import json
import shutil

import pytest

from k26jax import LLM, SamplingParams
from k26jax.cli import main
from k26jax.errors import RequestError
from k26jax.text.chat import ChatFormat
from k26jax.text.events import ChatMessage, Finish

PARAMS = SamplingParams(temperature=0, max_tokens=12)
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking is false %}a{% endif %}"
)


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(**small_pair.options) as llm:
        llm.chat_format = ChatFormat(folder, llm.engine.loaded.tokenizer)
        yield llm


def chat_of(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_chat_gives_the_tokens_of_its_prompt(llm, small_pair):
    text = small_pair.letters[:5]
    expected = llm.generate(text, PARAMS)[0].outputs[0]
    (result,) = llm.chat(chat_of(text), PARAMS)
    (output,) = result.outputs
    assert (result.prompt, result.prompt_token_ids) == (text, small_pair.encode(text))
    assert output.token_ids == expected.token_ids
    assert (output.message.content, output.message.reasoning) == (expected.text, None)
    assert output.message.finish_reason == expected.finish_reason
    assert output.record(5)["usage"]["total_tokens"] == 5 + len(output.token_ids)
    assert output.record(5)["message"]["content"] == expected.text


def test_many_chats_in_their_order_and_an_error_in_its_place(llm, small_pair):
    texts = [small_pair.letters[i : i + 3] for i in range(3)]
    chats = [chat_of(texts[0]), [{"role": "robot"}], chat_of(texts[1]), chat_of(texts[2] * 40)]
    found = llm.chat(chats, PARAMS)
    alone = [output.outputs[0].token_ids for output in llm.generate(texts[:2], PARAMS)]
    assert [bool(result.error) for result in found] == [False, True, False, True]
    assert [found[i].outputs[0].token_ids for i in (0, 2)] == alone
    assert "role is 'robot'" in found[1].error
    assert "the context" in found[3].error
    with pytest.raises(RequestError, match="role is 'robot'"):
        llm.chat(chats, PARAMS, raise_on_error=True)


def test_a_stream_of_events_adds_up_to_the_message(llm, small_pair):
    text = small_pair.letters[3:9]
    whole = llm.chat(chat_of(text), PARAMS, thinking=False)[0].outputs[0]
    steps = list(llm.stream_chat(chat_of(text), PARAMS, thinking=False))
    events = [event for step in steps for event in step]
    assert ChatMessage(events).record() == whole.message.record()
    assert events[-1] == whole.message.finish
    assert sum(isinstance(event, Finish) for event in events) == 1
    assert len(steps) > 1


def test_stop_strings_end_a_chat_as_they_end_a_text(llm, small_pair):
    text = small_pair.letters[:5]
    plain = llm.generate(text, PARAMS)[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=12, stop=[plain[3]])
    expected = llm.generate(text, params)[0].outputs[0]
    message = llm.chat(chat_of(text), params)[0].outputs[0].message
    assert message.content == expected.text
    assert (message.finish.reason, message.finish.stop_reason) == ("stop", plain[3])


def test_an_answer_of_a_given_shape(llm, small_pair):
    """Whole and as a stream."""
    words = [small_pair.letters[:3], small_pair.letters[2:9]]
    params = SamplingParams(temperature=0, structured_outputs={"choice": words})
    text = small_pair.letters[:5]
    (whole,) = llm.chat(chat_of(text), params)[0].outputs
    assert (whole.message.content in words, whole.message.finish_reason) == (True, "stop")
    events = [event for step in llm.stream_chat(chat_of(text), params) for event in step]
    assert ChatMessage(events).record() == whole.message.record()
    assert "there are no tools" in llm.chat(chat_of(text), params, tool_choice="required")[0].error
    with pytest.raises(RequestError, match="parallel_tool_calls is 3"):
        llm.stream_chat(chat_of(text), params, parallel_tool_calls=3)


def test_unknown_options_are_refused_by_name(llm):
    with pytest.raises(TypeError, match="'thinkin'; did you mean 'thinking'"):
        llm.chat(chat_of("a"), thinkin=True)
    with pytest.raises(TypeError, match="stream_chat got an unexpected keyword 'tool'"):
        llm.stream_chat(chat_of("a"), tool=[])
    with pytest.raises(RequestError, match="sampling_params is"):
        llm.chat(chat_of("a"), {"max_tokens": 3})
    assert "expected a list of objects" in llm.chat("abc", PARAMS)[0].error
    assert "messages is empty" in llm.chat([], PARAMS)[0].error


@pytest.fixture(scope="module")
def chat_flags(small_pair, tmp_path_factory) -> list[str]:
    """Flags of the small pair with a template in its folder."""
    folder = tmp_path_factory.mktemp("target") / "small"
    shutil.copytree(small_pair.target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return [str(folder) if flag == str(small_pair.target) else flag for flag in small_pair.flags]


def test_generate_shows_the_answer_of_a_chat(llm, small_pair, chat_flags, capsys):
    system, text = small_pair.letters[7], small_pair.letters[:4]
    messages = [{"role": "system", "content": system}, *chat_of(text)]
    (result,) = llm.chat(messages, PARAMS, thinking=False)
    argv = ["generate", text, "--chat", "--system", system, "--instant", "--temperature", "0"]
    argv += ["--max-tokens", "12", *chat_flags]
    assert main(argv) == 0
    assert capsys.readouterr().out == result.outputs[0].message.content + "\n"
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["token_ids"] == result.outputs[0].token_ids
    assert record["message"] == result.outputs[0].message.record()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--system", "x"], "--system is of a chat; give --chat too"),
        (["--instant"], "--instant is of a chat"),
    ],
)
def test_flags_of_a_chat_alone_are_refused_without_one(argv, words, capsys):
    assert main(["generate", "a", *argv, "--model-path", "m"]) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_cannot_chat_says_so_before_it_is_loaded(small_pair, capsys):
    assert main(["generate", "a", "--chat", *small_pair.flags]) == 3
    err = capsys.readouterr().err
    assert "has no chat template" in err
    assert "load" not in err
