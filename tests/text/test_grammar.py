"""Grammars over a vocabulary: masks, gates, what is refused; answers drawn at random from masks."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k26jax.errors import RequestError
from k26jax.text.answer import ChatAnswer
from k26jax.text.call_grammar import chat_structure, parameters_structures
from k26jax.text.chat import ChatFormat, ChatPrompt
from k26jax.text.grammar import Grammars, Guide
from k26jax.text.structured import check_structure, response_structure
from k26jax.text.tokenizer import load_tokenizer

VOCABULARY = 4100  # four ids more than the tokenizer has
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": SCHEMA}}
READ = {"type": "function", "function": {"name": "read-file", "parameters": {"enum": [{"a": 1}]}}}
TOOLS = [SEARCH, READ]
NAMED = {"type": "function", "function": {"name": "read-file"}}


@pytest.fixture(scope="module")
def grammars(trained) -> Grammars:
    return Grammars(trained, VOCABULARY, trained.eos_ids)


def mask(grammars: Grammars, guide: Guide) -> np.ndarray:
    """The ids that may come next."""
    masks = np.full((1, grammars.words), 0xFFFFFFFF, np.uint32)
    grammars.fill(guide.collect([0], [-1], masks, 0), masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))


def draw(grammars: Grammars, structure, seed: int, most: int = 400) -> list[int]:
    """An answer whose tokens are drawn from the masks alone, up to its end token."""
    rng, guide, ids = random.Random(seed), grammars.guide(structure), []
    while not ids or ids[-1] not in grammars._eos_ids:
        assert len(ids) < most
        allowed = mask(grammars, guide)
        assert allowed[-1] < 4096
        ids.append(int(rng.choice(allowed)))
        guide.advance(ids[-1:])
    return ids


def fits(value) -> bool:
    return (
        value.keys() == {"name", "kind", "ages"}
        and len(value["name"]) <= 8
        and value["kind"] in ("cat", "dog")
        and len(value["ages"]) <= 3
        and all(isinstance(age, int) and age <= 99 for age in value["ages"])
    )


@pytest.mark.parametrize("seed", range(5))
def test_any_answer_that_the_masks_let_pass_is_of_the_shape(grammars, trained, seed):
    text = trained.decode(draw(grammars, {"json": SCHEMA}, seed))
    assert fits(json.loads(text))
    pattern = r"[a-z]{2,4}/\d+ (x|y)"
    assert re.fullmatch(pattern, trained.decode(draw(grammars, {"regex": pattern}, seed)))
    words = ["yes", 'no, "never"\n', "é漢🙂"]
    assert trained.decode(draw(grammars, {"choice": words}, seed)) in words
    lark = 'start: "<" (start | /[0-9]/) ">"'
    assert re.fullmatch("<+[0-9]>+", trained.decode(draw(grammars, {"grammar": lark}, seed)))
    gbnf = 'root ::= "a" | "b" root'
    assert re.fullmatch("b*a", trained.decode(draw(grammars, {"grammar": gbnf}, seed)))


def test_end_tokens_come_where_the_shape_is_complete_and_there_alone(grammars, trained):
    guide = grammars.guide({"regex": "ab?"})
    assert not set(trained.eos_ids) & set(mask(grammars, guide))
    guide.advance(trained.encode("a"))
    assert set(trained.eos_ids) < set(mask(grammars, guide))
    guide.advance(trained.encode("b"))
    assert set(mask(grammars, guide)) == set(trained.eos_ids)
    guide.advance([trained.eos_ids[0], 5, 6])  # bug T54: nothing is asked behind the end
    assert len(mask(grammars, guide)) == grammars.words * 32


def test_control_tokens_are_no_text(grammars, trained):
    guide = grammars.guide({"json": {"type": "string"}})
    guide.advance(trained.encode('"'))
    allowed = set(mask(grammars, guide))
    assert len(allowed) > 3000
    assert not allowed & set(trained.special_ids.values())


def test_a_tree_s_nodes_have_the_masks_of_their_paths(grammars, trained):
    """Rows of forbidden nodes, what hangs below them, and padding stay as they were."""
    structure = {"choice": ["aba", "abb", "ca"]}
    a, b, c, x = (trained.encode(letter)[0] for letter in "abcx")
    token_ids = [0, a, c, x, b, a, b, a, 0]
    parents = [-1, 0, 0, 0, 1, 2, 3, 4, -1]
    masks = np.full((11, grammars.words), 7, np.uint32)
    guide = grammars.guide(structure)
    grammars.fill(guide.collect(token_ids, parents, masks, 1), masks)
    untouched = [row for row in range(11) if (masks[row] == 7).all()]
    assert untouched == [0, 4, 7, 9, 10]
    for row, path in ((1, []), (2, [a]), (3, [c]), (5, [a, b]), (6, [c, a]), (8, [a, b, a])):
        alone = grammars.guide(structure)
        alone.advance(path)
        bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == mask(grammars, alone).tolist(), row
    # The tree has not moved the guide itself.
    assert {a, c} < set(mask(grammars, guide))


def test_a_gate_opens_behind_its_token_or_with_it(grammars, trained):
    ids = trained.special_ids
    close, begin, call = ids["</think>"], ids["<|tool_calls_section_begin|>"], 3853
    after = grammars.guide({"choice": ["yes"], "after": "</think>"})
    allowed = set(mask(grammars, after))
    assert allowed == set(range(grammars.words * 32)) - {*ids.values()} | {close}
    after.advance([5, 6, close])
    assert trained.decode(sorted(mask(grammars, after))[:1]) == "y"
    at = grammars.guide(
        {"grammar": f'start: <[{begin}]> "x"', "at": "<|tool_calls_section_begin|>"}
    )
    assert {begin, *trained.eos_ids, close} < set(mask(grammars, at))
    assert call not in mask(grammars, at)
    at.advance([5, close, begin])
    assert mask(grammars, at).tolist() == trained.encode("x")
    # A tree across the gate.
    masks = np.zeros((3, grammars.words), np.uint32)
    guide = grammars.guide({"choice": ["yes"], "after": "</think>"})
    grammars.fill(guide.collect([0, close, trained.eos_ids[0]], [-1, 0, 0], masks, 0), masks)
    assert [int(row.any()) for row in masks] == [1, 1, 0]


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "objct"}}, "here: Invalid type: objct"),
        ({"json": {"enum": []}}, "here: Unsatisfiable schema"),
        ({"json": {"$ref": "#/$defs/a"}}, "does not exist"),
        ({"json": False}, "expected a JSON schema"),
        ({"json": "{"}, "no JSON"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": "a" * 70_000}, "70000 characters, at most 65536"),
        ({"json": {"description": "a" * (1 << 20)}}, "at most 1048576"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "start: A\nA: /a+/ & /b+/"}, "here: "),
        ({"grammar": "root ::= (("}, "Expected"),
        ({"choice": []}, "expected a list of 1"),
        ({"choice": ["a", ""]}, "expected a list of 1"),
        ({"json_object": False}, "expected true"),
        ({"regex": "a", "after": "</thought>"}, "no control token of the model"),
        ({"regex": "a", "after": "</think>", "at": "</think>"}, "after and at of"),
        ({}, "none of"),
        ([], "expected an object"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(grammars, structure, message):
    def ask():
        check_structure(structure, "here")
        grammars.check(structure, "here")

    with pytest.raises(RequestError, match=re.escape(message)):
        ask()


def test_long_chains_end_no_process(checkpoints):
    """The library's recursion over references and rules overflows a usual stack at a thousand."""
    code = """
import sys
from k26jax.errors import RequestError
from k26jax.text.grammar import Grammars
from k26jax.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
grammars = Grammars(tokenizer, 4096, tokenizer.eos_ids)
def chain(count):
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(count)}
    return {"json": {"$ref": "#/$defs/0", "$defs": links | {str(count): {"type": "string"}}}}
rules = "\\n".join(f"a{i}:a{i + 1}|\\"x\\"" for i in range(3900))
for structure in (chain(4000), chain(20000), {"grammar": f"start:a0\\n{rules}\\na3900:\\"y\\""}):
    try:
        grammars.check(structure)
        grammars.guide(structure)
        print("taken")
    except RequestError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoints / "k26-tiny")],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.splitlines()[1:] == ["structured_outputs: schema too large", "taken"]


def test_without_tokenizer_or_end_token(trained):
    for grammars, message in (
        (Grammars(None, 7, (1,)), "holds none"),
        (Grammars(trained, VOCABULARY, ()), "needs an end token"),
    ):
        with pytest.raises(RequestError, match=message):
            grammars.check({"regex": "a"})


def test_without_the_library(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install 'k26jax\\[server\\]'"):
        Grammars(trained, VOCABULARY, trained.eos_ids).check({"regex": "a"}, "response_format")


def test_the_vocabulary_of_a_tokenizer_json(small_pair):
    tokenizer = load_tokenizer(small_pair.target)
    grammars = Grammars(tokenizer, small_pair.config.vocab_size, small_pair.config.eos_token_ids)
    letters = small_pair.letters
    pattern = f"{letters[0]}[{letters[1:4]}]+{letters[5]}"
    for seed in range(3):
        ids = draw(grammars, {"regex": pattern}, seed)
        assert re.fullmatch(pattern, small_pair.decode(ids))
        assert ids[-1] in small_pair.config.eos_token_ids


@pytest.mark.parametrize(
    ("value", "structure"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {}}},
            {"json": {}},
        ),
    ],
)
def test_response_formats(value, structure):
    assert response_structure(value) == structure


def prompt_of(trained, checkpoints, **more) -> ChatPrompt:
    messages = [{"role": "user", "content": "hi"}]
    return ChatFormat(checkpoints / "k26-tiny", trained).prompt(messages, **more)


def read(trained, prompt: ChatPrompt, ids: list[int]):
    answer = ChatAnswer(trained, prompt, max_tokens=len(ids) + 1, stop_ids=trained.eos_ids)
    answer.push(ids)
    return answer.message


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", True), ("required", False), (NAMED, True)]
)
def test_bug_11_a_forced_call_is_a_valid_call(
    grammars, trained, checkpoints, choice, parallel, seed
):
    prompt = prompt_of(trained, checkpoints, tools=TOOLS, thinking=False)
    structure = chat_structure(prompt, None, trained.special_ids, choice=choice, parallel=parallel)
    message = read(trained, prompt, draw(grammars, structure, seed, 4000))
    calls = message.record()["tool_calls"]
    assert message.finish.reason == "tool_calls"
    assert not message.content
    assert (parallel and choice == "required") or len(calls) == 1
    names = [call["function"]["name"] for call in calls]
    assert calls[0]["id"] == f"functions.{names[0]}:0"
    assert set(names) <= ({"search", "read-file"} if choice == "required" else {"read-file"})
    for name, call in zip(names, calls, strict=True):
        arguments = json.loads(call["function"]["arguments"])
        assert fits(arguments) if name == "search" else arguments == {"a": 1}


def test_shapes_of_chats(grammars, trained, checkpoints):
    ids = trained.special_ids
    begin = ids["<|tool_calls_section_begin|>"]
    plain = prompt_of(trained, checkpoints, thinking=False)
    thinks = prompt_of(trained, checkpoints, tools=TOOLS)
    shape = {"regex": "[0-9]+"}
    assert chat_structure(plain, None, ids) is None
    assert chat_structure(thinks, None, ids, choice="auto") is None
    assert chat_structure(plain, shape, ids) == shape
    # Thoughts first; then a call, or an answer of the shape.
    found = chat_structure(thinks, shape, ids)
    assert found["after"] == "</think>"
    guide = grammars.guide(found)
    guide.advance([ids["</think>"]])
    assert begin in mask(grammars, guide)
    assert {*"0123456789"} <= {trained.decode([id]) for id in mask(grammars, guide)}
    # Calls come if they come, and then one.
    one = chat_structure(thinks, None, ids, parallel=False)
    assert one["at"] == "<|tool_calls_section_begin|>"
    guide = grammars.guide(one)
    guide.advance([*trained.encode("so"), ids["</think>"], begin, ids["<|tool_call_begin|>"]])
    guide.advance(trained.encode("functions.read-file:0"))
    guide.advance([ids["<|tool_call_argument_begin|>"], *trained.encode('{"a":1}')])
    guide.advance([ids["<|tool_call_end|>"]])
    assert mask(grammars, guide).tolist() == [ids["<|tool_calls_section_end|>"]]
    with pytest.raises(RequestError, match="set of grammars"):
        chat_structure(thinks, {"grammar": '{"grammars": []}'}, ids)
    named = parameters_structures(thinks.tools, NAMED)
    assert list(named) == ["tools[1].function.parameters"]
