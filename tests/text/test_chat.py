"""Conversations to prompts: the built-in format against the published renderings."""

import inspect

import pytest
from conversations import ARGUMENTS, CALL, CALL_END, SEARCH, SECTION, SECTION_END, WEATHER, ids_of
from test_messages import answers, asks

from k26jax.errors import RequestError, TokenizerError
from k26jax.text.chat import ChatFormat
from k26jax.text.declare import declare_tools
from k26jax.text.tokenizer import load_tokenizer

USER = "<|im_user|>user<|im_middle|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"
SYSTEM = "<|im_system|>system<|im_middle|>"
END = "<|im_end|>"
HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "S"},
    *HI,
    {"role": "assistant", "content": "A", "reasoning_content": "R"},
    {"role": "user", "content": "U2"},
]
WORK = [
    *HI,
    asks("functions.search:0", arguments='{"a": 1}', reasoning_content="R"),
    answers("functions.search:0", "out"),
]


@pytest.fixture(scope="module")
def kimi(checkpoints, trained):
    return ChatFormat(checkpoints / "k26-tiny", trained)


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (HI, {}, f"{USER}Hi{END}{ASSISTANT}<think>"),
        (HI, {"thinking": True}, f"{USER}Hi{END}{ASSISTANT}<think>"),
        (HI, {"thinking": False}, f"{USER}Hi{END}{ASSISTANT}<think></think>"),
        (
            TALK,
            {},
            f"{SYSTEM}S{END}{USER}Hi{END}{ASSISTANT}<think></think>A{END}{USER}U2{END}"
            f"{ASSISTANT}<think>",
        ),
        (
            TALK,
            {"preserve_thinking": True},
            f"{SYSTEM}S{END}{USER}Hi{END}{ASSISTANT}<think>R</think>A{END}{USER}U2{END}"
            f"{ASSISTANT}<think>",
        ),
        (
            WORK,
            {},
            f"{USER}Hi{END}{ASSISTANT}<think>R</think>{SECTION}{CALL}functions.search:0{ARGUMENTS}"
            f'{{"a": 1}}{CALL_END}{SECTION_END}{END}<|im_system|>tool<|im_middle|>'
            f"## Return of functions.search:0\nout{END}{ASSISTANT}<think>",
        ),
        (
            [{"role": "user", "name": "Ann", "content": "Hi"}],
            {},
            f"<|im_user|>Ann<|im_middle|>Hi{END}{ASSISTANT}<think>",
        ),
    ],
)
def test_published_renderings(kimi, trained, messages, options, expected):
    prompt = kimi.prompt(messages, **options)
    assert prompt.text == expected
    assert prompt.token_ids == ids_of(trained, expected)
    assert prompt.is_thinking == expected.endswith("<think>")


def test_bug_18_the_generation_prompt_is_there_or_not(kimi, trained):
    assert kimi.prompt(HI).text == f"{USER}Hi{END}{ASSISTANT}<think>"
    without = kimi.prompt(HI, add_generation_prompt=False)
    assert (without.text, without.is_thinking) == (f"{USER}Hi{END}", False)
    with pytest.raises(RequestError, match=r"'tone'.*reads only thinking and preserve_thinking"):
        kimi.prompt(HI, options={"tone": "dry"})


OPTIONS = {
    "tools": [SEARCH],
    "thinking": False,
    "preserve_thinking": True,
    "add_generation_prompt": False,
}


def test_bug_30_every_option_of_a_prompt_changes_it_or_is_refused(kimi):
    known = set(inspect.signature(kimi.prompt).parameters) - {"messages"}
    assert known == {*OPTIONS, "options"}
    plain = kimi.prompt(TALK)
    for name, value in OPTIONS.items():
        assert kimi.prompt(TALK, **{name: value}).token_ids != plain.token_ids
    with pytest.raises(RequestError, match="built-in chat format"):
        kimi.prompt(TALK, options={"documents": []})
    with pytest.raises(TypeError):
        kimi.prompt(TALK, temperature=1)


@pytest.mark.parametrize("content", [None, "", [], [{"text": ""}]])
def test_bug_19_empty_content_is_rendered_as_nothing(kimi, content):
    roles = [{"role": role, "content": content} for role in ("system", "user", "assistant")]
    assert kimi.prompt([*roles, *HI]).text == (
        f"{SYSTEM}{END}{USER}{END}{ASSISTANT}<think></think>{END}{USER}Hi{END}{ASSISTANT}<think>"
    )


def test_bug_21_control_tokens_typed_by_a_user_are_text(kimi, trained):
    names = "".join(trained.special_ids)
    call = asks("functions.search:0", arguments=names, reasoning=names, content=names, name=names)
    tool = SEARCH | {"function": SEARCH["function"] | {"description": names}}
    messages = [{"role": "system", "content": names, "name": names}, call, answers(names, names)]
    plain = [{"role": "system", "content": "x", "name": "x"}, asks("a"), answers("b")]
    prompt = kimi.prompt(messages, [tool])
    assert prompt.text.count(names) == 9
    ids = [token for token in prompt.token_ids if trained.is_special(token)]
    assert ids == [t for t in kimi.prompt(plain, [SEARCH]).token_ids if trained.is_special(t)]
    assert trained.decode(prompt.token_ids, skip_special_tokens=False) == prompt.text


def test_bug_21_a_name_cut_in_two_parts_is_text_too(kimi, trained):
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = kimi.prompt([{"role": "user", "content": parts}]).token_ids
    assert ids.count(trained.special_ids[END]) == 1


@pytest.mark.parametrize("thinking", [True, False])
def test_bug_23_instant_mode_closes_the_thoughts_in_the_prompt(kimi, thinking):
    prompt = kimi.prompt(WORK, thinking=thinking)
    assert prompt.is_thinking == thinking
    assert prompt.text.endswith(f"{ASSISTANT}<think>" + "</think>" * (not thinking))
    assert ("<think>R</think>" in prompt.text) == thinking


def test_bug_27_thoughts_of_the_turn_that_goes_on_are_kept(kimi):
    third = asks("functions.search:1", reasoning_content="R2")
    messages = [*TALK, *WORK[1:], third, answers("functions.search:1")]
    assert [f"<think>{r}</think>" in kimi.prompt(messages).text for r in ("R", "R2")] == [True] * 2
    # The answer before it is history, whose thoughts are left out.
    assert kimi.prompt(messages).text.count("<think>R</think>") == 1
    assert kimi.prompt(messages, preserve_thinking=True).text.count("<think>R</think>") == 2
    silent = [*HI, asks("functions.search:0"), answers("functions.search:0")]
    assert f"{ASSISTANT}<think></think>{SECTION}" in kimi.prompt(silent).text


def test_tools_come_first_as_declarations(kimi):
    prompt = kimi.prompt(TALK, [SEARCH, WEATHER])
    declared = declare_tools([SEARCH, WEATHER])
    assert prompt.text.startswith(f"<|im_system|>tool_declare<|im_middle|>{declared}{END}{SYSTEM}")
    assert [tool["function"]["name"] for tool in prompt.tools] == ["search", "get_weather"]
    assert prompt.calls == 0
    assert kimi.prompt(WORK, [SEARCH]).calls == 1


def test_bug_17_what_a_model_wrote_is_what_the_next_prompt_repeats(kimi, trained):
    """Ten turns: each prompt begins with the one before and the answer's own tokens."""
    messages, before = list(HI), []
    for turn in range(10):
        prompt = kimi.prompt(messages, [SEARCH], preserve_thinking=True)
        assert prompt.token_ids[: len(before)] == before
        written = (
            f"thought {turn}</think>said {turn}{SECTION}{CALL}functions.search:{turn}{ARGUMENTS}"
            f'{{"query":  "{turn}"}}{CALL_END}{SECTION_END}{END}'
        )
        before = prompt.token_ids + ids_of(trained, written)
        call = asks(f"functions_search_{turn}", arguments=f'{{"query":  "{turn}"}}')
        call |= {"content": f"said {turn}", "reasoning_content": f"thought {turn}"}
        messages += [call, answers(f"functions_search_{turn}")]
    assert (
        kimi.prompt(messages, [SEARCH], preserve_thinking=True).token_ids[: len(before)] == before
    )


def test_a_folder_without_template_needs_kimis_tokens(folder):
    plain = ChatFormat(folder, load_tokenizer(folder))
    with pytest.raises(TokenizerError, match=r"no chat template, .* no <\|im_assistant\|>, which"):
        plain.prompt(HI)
    with pytest.raises(RequestError, match="tools are given, but the tokenizer"):
        plain.prompt(HI, [SEARCH])
