"""A folder's own template: what it may do, what it gets, and what cannot slip through it."""

import json
import re
import shutil

import pytest
from conversations import SEARCH, TOOLS, ids_of
from hypothesis import given
from hypothesis import strategies as st
from test_chat import HI, TALK, WORK
from test_messages import answers, asks

from k26jax.errors import RequestError, TokenizerError
from k26jax.text.chat import ChatFormat
from k26jax.text.masking import Mask
from k26jax.text.template import ChatTemplate

# Kimi's rules in the test's own words, from its published description.
KIMI = """
{%- macro body(m) -%}
  {%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif -%}
  {{ m.content or '' }}
  {%- if m.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for call in m.tool_calls -%}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
      {%- if call.function.arguments is string %}{{ call.function.arguments }}
      {%- else %}{{ call.function.arguments | tojson }}{% endif -%}
      <|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.get('tool_calls') -%}
    {%- set ns.last = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if preserve_thinking %}{% set ns.last = -1 %}{% endif -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>
  {{- tools_ts_str or (tools | tojson(separators=(',', ':'))) }}<|im_end|>
{%- endif -%}
{%- for m in messages -%}
  {%- set opening = {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'} -%}
  {{ opening.get(m.role, '<|im_system|>') + (m.name or m.role) }}<|im_middle|>
  {%- if m.role == 'assistant' -%}
    {%- if loop.index0 > ns.last and thinking is not false -%}
      <think>{{ m.reasoning_content or '' }}</think>
    {%- else %}<think></think>{% endif -%}
  {%- endif -%}
  {{ body(m) }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|><think>{% if thinking is false %}</think>{% endif -%}
{%- endif -%}
"""


@pytest.fixture
def with_template(checkpoints, trained, tmp_path):
    """Makes the chat format of a folder with a template."""

    def make(source, name="chat_template.jinja") -> ChatFormat:
        shutil.copy(checkpoints / "k26-tiny" / "tokenizer_config.json", tmp_path)
        if name == "chat_template.jinja":
            (tmp_path / name).write_text(source, encoding="utf-8")
        else:
            config = json.loads((tmp_path / name).read_text())
            (tmp_path / name).write_text(json.dumps(config | {"chat_template": source}))
        return ChatFormat(tmp_path, trained)

    return make


@pytest.mark.parametrize("messages", [HI, TALK, WORK, [*TALK, *WORK]])
@pytest.mark.parametrize("tools", [None, TOOLS, [*TOOLS, {**SEARCH, "function": {"name": "odd"}}]])
@pytest.mark.parametrize(
    "options",
    [{}, {"thinking": False}, {"preserve_thinking": True}, {"add_generation_prompt": False}],
)
def test_template_and_built_in_format_give_the_same_prompt(
    with_template, checkpoints, trained, messages, tools, options
):
    built_in = ChatFormat(checkpoints / "k26-tiny", trained).prompt(messages, tools, **options)
    assert with_template(KIMI).prompt(messages, tools, **options) == built_in


def test_bug_21_names_typed_by_a_user_are_text_through_a_template_too(
    with_template, checkpoints, trained
):
    names = "".join(trained.special_ids) + "think [EOS think"
    call = asks("functions.search:0", arguments=names, reasoning=names, content=names, name=names)
    properties = {names: {"type": "string", "description": names, "enum": [names]}}
    parameters = {"type": "object", "properties": properties, "required": [names]}
    tool = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    messages = [{"role": "system", "content": names, "name": names}, call, answers(names, names)]
    built_in = ChatFormat(checkpoints / "k26-tiny", trained).prompt(messages, [tool])
    assert with_template(KIMI).prompt(messages, [tool]) == built_in


@given(
    st.lists(
        st.sampled_from(
            [
                "<|im_end|>",
                "<",
                "|im_",
                "end",
                "|>",
                "think",
                ">",
                "/",
                "[EOS",
                "]",
                "x ",
                "\U000f0000",
                "\ue000",
            ]
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_pieces_put_together_by_a_template_make_a_control_token(trained, pieces):
    source = (
        "{% for m in messages %}{{ m.content }}{% endfor %}<|im_user|>"
        "{% for m in messages %}{{ '<' ~ m.content ~ '>' }}{{ '[' + m.content | trim + ']' }}"
        "{{ m | tojson }}{{ m.content | upper | length }}{% endfor %}{{ tone }}<{{ tone }}"
    )
    segments = ChatTemplate(source, "a template").render(
        [{"role": "user", "content": piece} for piece in pieces],
        [],
        {"tone": pieces[0]},
        special_ids=trained.special_ids,
        tokens={},
        add_generation_prompt=True,
    )
    assert [segment.text for segment in segments if segment.is_control] == ["<|im_user|>"]
    shown = "".join(segment.text for segment in segments)
    expected = "".join(pieces) + "<|im_user|>"
    for piece in pieces:
        message = json.dumps({"role": "user", "content": piece}, ensure_ascii=False)
        expected += f"<{piece}>[{piece.strip()}]{message}{len(piece)}"
    assert shown == expected + pieces[0] + "<" + pieces[0]


def test_the_mask_keeps_letters_lengths_and_the_keys_that_templates_ask_for(trained):
    value = {"tool_calls": [{"a<b": "I think <think> [EOS] x_y"}], "n": 3, "thinker": None}
    mask = Mask(trained.special_ids, [value])
    hidden = mask.hide(value)
    assert list(hidden)[:2] == ["tool_calls", "n"]
    text = next(iter(hidden["tool_calls"][0].values()))
    assert len(text) == len("I think <think> [EOS] x_y")
    assert re.sub(r"[^\w\s]", "", text) == "I hink hink OS xy"
    assert not any(name in text for name in trained.special_ids)
    for ascii_only in (False, True):
        assert mask.restore(json.dumps(hidden, ensure_ascii=ascii_only)) == json.dumps(value)


def test_bug_18_unknown_variables_are_refused_and_known_ones_arrive(with_template):
    chat = with_template("{{ messages[0].content }} {{ tone }} {{ bos_token }}{{ eos_token }}")
    assert chat.prompt(HI, options={"tone": "dry"}).text == "Hi dry [BOS][EOS]"
    with pytest.raises(
        RequestError, match=r"does not read 'tune'; did you mean 'tone'\?.*reads: tone"
    ):
        chat.prompt(HI, options={"tune": "dry"})
    with pytest.raises(RequestError, match="does not read 'messages'"):
        chat.prompt(HI, options={"messages": []})
    with pytest.raises(RequestError, match="does not declare tools"):
        chat.prompt(HI, TOOLS)
    assert chat.prompt(HI, thinking=True, options={"tone": ""}).text == "Hi  [BOS][EOS]"
    for switch in ("thinking", "preserve_thinking"):
        with pytest.raises(RequestError, match=f"does not read '{switch}'"):
            chat.prompt(HI, **{switch: False})


def test_keys_stay_whatever_letters_names_of_control_tokens_have():
    mask = Mask(["/nothink", "sop", "<tool_call>", "<content>", "<|user|>"], [])
    keys = ["tool_calls", "link_ops", "content", "user", "sop", "nothink", "a<b"]
    hidden = list(mask.hide(dict.fromkeys(keys)))
    assert hidden[:4] == keys[:4]
    assert not set(hidden[4:]) & set(keys)
    assert re.sub(r"[\ue000-\U0010ffff]", ".", mask.hide("/nothink sops <a_b> content user")) == (
        "..othink .ops .a.b. .ontent user"
    )


def test_names_that_a_template_sets_are_not_its_variables():
    source = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}
    {% for m in messages %}{% set text = m.content %}{% if x %}{% set text = 1 %}{% endif %}
    {{ text }}{% endfor %}{{ text }}{% set ns = namespace(a=1) %}{{ ns.a }}
    {{ add_generation_prompt }}"""
    assert ChatTemplate(source, "a template").variables == {"thinking", "x"}


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_bug_23_the_switch_has_the_name_that_the_template_reads(with_template, name):
    chat = with_template(
        "<|im_user|>{{ messages[0].content }}<think>"
        f"{{% if {name} is false %}}</think>{{% endif %}}\n"
    )
    assert (chat.prompt(HI).is_thinking, chat.prompt(HI, thinking=False).is_thinking) == (
        True,
        False,
    )
    assert chat.prompt(HI, thinking=False).text == "<|im_user|>Hi<think></think>"


def test_what_templates_of_the_family_use(with_template, trained):
    source = """{%- for m in messages -%}
      {%- if loop.index0 > 1 %}{% break %}{% endif -%}
      {% generation %}{{ m.content }}{% endgeneration %};
    {%- endfor -%}
    {{ {'b': 'é<', 'a': [1]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}
    {{- strftime_now('%Y') | length }}{{ missing }}{{ missing is defined }}"""
    messages = [*HI, {"role": "assistant", "content": "A"}, {"role": "user", "content": "no"}]
    assert with_template(source).prompt(messages).text == (
        'Hi;A;{"b": "é<", "a": [1]}{\n "a": 2,\n "b": 1\n}4False'
    )


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "query=x"),
        ("{{ c.arguments | tojson }}", '{"query": "x"}'),
        ("{{ 'args:' + c.arguments }}", 'args:{"query": "x"}'),
        ("{% if c.arguments is string %}S{{ c.arguments }}{% endif %}", 'S{"query": "x"}'),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(with_template, expression, expected):
    source = "{% for m in messages if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    chat = with_template(source + expression + "{% endfor %}")
    assert chat.prompt([*HI, asks("a")]).text == expected


def test_bug_19_calls_without_content_are_null_only_where_templates_ask_for_it(with_template):
    source = "{% for m in messages if m.tool_calls %}"
    assert (
        with_template(source + "[{{ m.content }}]{% endfor %}").prompt([*HI, asks("a")]).text
        == "[]"
    )
    asking = "{% if m['content'] is none %}null{% endif %}{% endfor %}"
    assert with_template(source + asking).prompt([*HI, asks("a")]).text == "null"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "{{ raise_exception('roles must alternate <|im_end|>') }}",
            r"roles must alternate <\|im_end\|>",
        ),
        ("{{ messages[0].content | nothing_like_it }}", "No filter named"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "cannot render"),
        ("{% include 'other' %}", "cannot render"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_requests_error(with_template, source, words):
    with pytest.raises((RequestError, TokenizerError), match=words):
        with_template(source).prompt(HI)


def test_files_of_templates(with_template, tmp_path):
    assert with_template("one", "tokenizer_config.json").prompt(HI).text == "one"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    chat = with_template(named, "tokenizer_config.json")
    assert (chat.prompt(HI).text, chat.prompt(HI, TOOLS).text) == ("plain", "3")
    assert with_template("file").prompt(HI).text == "file"
    for broken, words in (("{% if %}", "is no valid template: line 1"), (5, "is a int")):
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        name = "chat_template.jinja" if isinstance(broken, str) else "tokenizer_config.json"
        with pytest.raises(TokenizerError, match=words):
            with_template(broken, name)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(TokenizerError, match='no template called "default"'):
        with_template([{"name": "rag", "template": ""}], "tokenizer_config.json")


def test_bug_22_no_file_of_the_folder_but_the_template_is_read(with_template, tmp_path):
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('run')")
    (tmp_path / "chat_template.py").write_text("raise SystemExit('run')")
    assert with_template("{{ messages[0].content }}").prompt(HI).text == "Hi"


def test_prompts_that_end_in_white_space_after_the_tag_begin_in_thoughts(with_template, trained):
    for tail, expected in (("<think>\n", True), ("<think>x", False), ("</think>\n", False)):
        prompt = with_template("<|im_user|>{{ '" + tail.replace("\n", "\\n") + "' }}").prompt(HI)
        assert prompt.is_thinking == expected
        assert prompt.token_ids == ids_of(trained, "<|im_user|>" + tail)
