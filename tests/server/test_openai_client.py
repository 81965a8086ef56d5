"""The official client, unchanged, against a real server of the trained pair."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import openai
import pydantic
import pytest
from fixtures.paths import REPOSITORY
from scripted import NAME, served

from k26jax import LLM, SamplingParams

CHECKPOINTS = REPOSITORY / "checkpoints"
PROMPTS = ["import os\n" * 20, "class Node:\n", "def main():\n", "for i in range(10):\n    x"]
GREEDY = {"temperature": 0, "max_tokens": 24}
MESSAGES = [{"role": "user", "content": "Write a sort."}]
BEYOND_OPENAI = ("repetition_penalty", "bad_words", "min_tokens")
EMPTY = {"type": "object", "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "search", "parameters": EMPTY}}


@pytest.fixture(scope="module")
def llm():
    # One size of prefill chunks: a program less to compile.
    with LLM(
        str(CHECKPOINTS / "k26-tiny"),
        speculative_draft_model_path=str(CHECKPOINTS / "k26-tiny-dflash"),
        speculative_ddtree_budget=16,
        max_running_requests=2,
        chunked_prefill_size=32,
        context_length=512,
        enable_prefix_caching=True,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm) -> dict:
    """What `LLM.generate` gives, before the server has the slots: by prompt, greedy and seeded."""
    greedy = SamplingParams(**GREEDY)
    seeded = SamplingParams(temperature=0.8, max_tokens=24, seed=7)
    found = {}
    for name, params in (("greedy", greedy), ("seeded", seeded)):
        assert (llm.engine.runner.flush() > 0) == (name == "seeded"), "the first prompt has a page"
        found[name] = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    llm.engine.runner.flush()
    return found


@pytest.fixture(scope="module")
def penalized(llm, alone) -> list:
    """What requests ask for, and the text that `LLM.generate` gives."""
    found = []
    for more in (
        {"frequency_penalty": 0.7, "presence_penalty": 0.5},
        {"repetition_penalty": 1.2, "bad_words": ["import"]},
        {"logit_bias": {"5": 3, "17": -100}, "min_tokens": 20},
    ):
        params = SamplingParams(**GREEDY, **more)
        found.append((more, llm.generate(PROMPTS[:1], params)[0].outputs[0].text))
    assert all(text != alone["greedy"][0] for _, text in found[:2])
    return found


@pytest.fixture(scope="module")
def server(llm, alone, penalized):
    with served(llm, api_keys=("key",)) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_completions_of_many_at_once_are_those_of_each_alone(client, alone):
    """Greedy and seeded, streamed and not, more of them than slots."""

    def ask(job):
        place, kind, streams = job
        more = GREEDY if kind == "greedy" else {"temperature": 0.8, "max_tokens": 24, "seed": 7}
        found = client.completions.create(model=NAME, prompt=PROMPTS[place], stream=streams, **more)
        if not streams:
            return found.choices[0].text
        return "".join(chunk.choices[0].text for chunk in found)

    jobs = [
        (place, kind, streams)
        for streams in (True, False)
        for kind in ("greedy", "seeded")
        for place in range(len(PROMPTS))
    ]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, jobs))
    assert found == [alone[kind][place] for place, kind, _ in jobs]
    assert len(set(alone["greedy"] + alone["seeded"])) == 8


def test_117_seeds_and_n(client):
    def texts(**more):
        found = client.completions.create(
            model=NAME, prompt=PROMPTS[1], temperature=1, max_tokens=6, **more
        )
        return [choice.text for choice in found.choices]

    three = texts(seed=5, n=3)
    assert three == texts(seed=5, n=3)
    assert three[1:] == [texts(seed=6)[0], texts(seed=7)[0]]
    assert len(set(three)) == 3
    for seed in (0, -1):
        assert texts(seed=seed) == texts(seed=seed)
    assert len({texts()[0] for _ in range(4)}) > 1


@pytest.mark.parametrize("thinking", [True, False])
def test_chat(client, thinking):
    more = {"extra_body": {"chat_template_kwargs": {"thinking": thinking}}}
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, **GREEDY, **more)
    message = whole.choices[0].message
    assert bool(getattr(message, "reasoning_content", None)) == thinking
    assert bool(message.content) == (not thinking)
    assert whole.choices[0].finish_reason in ("stop", "length")
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    stream = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
        **more,
    )
    chunks = list(stream)
    assert chunks[-1].usage == usage
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == (getattr(message, "reasoning_content", None) or "")
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(chunks) > 4


def test_a_chat_that_goes_on_is_not_prefilled_again(server, client, alone):
    """Bug 57: and the answers are those of prompts that are run whole."""
    key = {"authorization": "Bearer key"}
    messages, turns = list(MESSAGES), []

    def ask():
        more = GREEDY | {"extra_body": {"chat_template_kwargs": {"thinking": False}}}
        return client.chat.completions.create(model=NAME, messages=messages, **more)

    for question in ("In C.", "Shorter.", "Why?"):
        turns.append(ask())
        answer = turns[-1].choices[0].message.content
        messages += [{"role": "assistant", "content": answer}]
        if len(turns) > 1:
            cached = turns[-1].usage.prompt_tokens_details.cached_tokens
            assert cached >= turns[-2].usage.prompt_tokens - 32
        messages += [{"role": "user", "content": question}]
    server.wait_idle()
    assert server.http.post("/flush_cache").status_code == 401
    kept = server.http.get("/server_info", headers=key).json()["prefix_cache"]
    assert 0 < kept["kept_tokens"] <= kept["tokens"] == 1024
    flushed = server.http.post("/flush_cache", headers=key)
    assert flushed.json() == {"flushed_tokens": kept["kept_tokens"]}
    del messages[-2:]
    whole = ask()
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.choices[0].message.content == turns[-1].choices[0].message.content
    text = server.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    cached = float(values['k26jax_cached_tokens_total{model_name="tiny"}'])
    assert 0 < cached < float(values['k26jax_prompt_tokens_total{model_name="tiny"}'])
    pages = whole.usage.prompt_tokens // 32
    assert float(values['k26jax_prefix_cache_usage_ratio{model_name="tiny"}']) == pages / 32
    assert float(values['k26jax_kv_cache_usage_ratio{model_name="tiny"}']) == 0


def test_the_prefix_cache_is_flushed_while_nothing_runs(server, client):
    with client.completions.create(
        model=NAME, prompt=PROMPTS[0], stream=True, max_tokens=400, temperature=0,
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
        refused = server.http.post("/flush_cache", headers={"authorization": "Bearer key"})
        assert refused.status_code == 409
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("busy", None)
        assert "run (1) or wait (0)" in error["message"]
    server.wait_idle()


def test_the_client_s_own_reader_of_streams(client):
    more = GREEDY | {"extra_body": {"chat_template_kwargs": {"thinking": False}}}
    plain = client.chat.completions.create(model=NAME, messages=MESSAGES, **more)
    text = plain.choices[0].message.content
    stop = text[8:12]  # the reader raises for an answer that its limit cut off
    with client.chat.completions.stream(
        model=NAME, messages=MESSAGES, tools=[TOOL], stop=stop, **more
    ) as stream:
        types = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= types
    assert final.choices[0].finish_reason == "stop"
    assert stop not in final.choices[0].message.content


def test_logprobs(client, alone):
    """Both routes, whole and streamed; the target's own, so penalties do not change their sum."""
    asked = {"model": NAME, "prompt": PROMPTS[0], **GREEDY}
    choice = client.completions.create(logprobs=2, **asked).choices[0]
    assert choice.text == alone["greedy"][0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    for offset, token in zip(told.text_offset, told.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    for token, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert value == max(top.values()) == top[token]  # greedy
    more = {"extra_body": {"chat_template_kwargs": {"thinking": False}}} | GREEDY
    asked = {"model": NAME, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **more}
    whole = client.chat.completions.create(**asked).choices[0]
    content = whole.logprobs.content
    raw = b"".join(bytes(item.bytes) for item in content)
    assert raw.decode() == whole.message.content
    assert all(item.top_logprobs[0].logprob == item.logprob for item in content)
    assert all(len(item.top_logprobs) == 3 for item in content)
    chunks = client.chat.completions.create(stream=True, **asked)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [item for part in parts if part for item in part.content or []] == content


def test_penalties_and_biases_are_those_of_generate(client, penalized):
    for more, text in penalized:
        body = {name: more.pop(name) for name in list(more) if name in BEYOND_OPENAI}
        found = client.completions.create(
            model=NAME, prompt=PROMPTS[0], extra_body=body, **GREEDY, **more
        )
        assert found.choices[0].text == text


def test_tools_and_stop(client, alone):
    found = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=[TOOL], tool_choice="none", **GREEDY
    )
    assert found.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="there are no tools") as caught:
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, tool_choice="required", **GREEDY
        )
    assert (caught.value.param, caught.value.code) == ("tool_choice", "invalid_value")
    text = alone["greedy"][0]
    stop = text[10:14]
    found = client.completions.create(model=NAME, prompt=PROMPTS[0], stop=[stop], **GREEDY)
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


class Pet(pydantic.BaseModel):
    """What the client makes a schema of."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=8)
    kind: Literal["cat", "dog"]
    ages: list[Annotated[int, pydantic.Field(ge=0, le=99)]] = pydantic.Field(max_length=3)


def test_schemas_and_forced_calls(client, alone):
    """Greedy and sampled, streamed and not, beside an answer that is free."""
    instant = {"chat_template_kwargs": {"thinking": False}}
    shared = {"model": NAME, "messages": MESSAGES, "max_tokens": 250, "extra_body": instant}
    tool = {"type": "function", "function": {"name": "f", "parameters": Pet.model_json_schema()}}

    def parsed(temperature):
        found = client.chat.completions.parse(
            response_format=Pet, temperature=temperature, seed=4, **shared
        )
        assert found.choices[0].finish_reason == "stop"
        assert found.choices[0].message.parsed.kind in ("cat", "dog")

    def called(choice):
        chunks = client.chat.completions.create(
            tools=[TOOL, tool], tool_choice=choice, parallel_tool_calls=False, stream=True,
            temperature=0.7, seed=1, **shared,
        )  # fmt: skip
        choices = [chunk.choices[0] for chunk in chunks]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert choices[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in choices)
        assert {call.index for call in calls} == {0}
        name = calls[0].function.name
        assert calls[0].id == f"functions.{name}:0"
        arguments = "".join(call.function.arguments for call in calls)
        assert Pet.model_validate_json(arguments) if name == "f" else json.loads(arguments) == {}
        return name

    def free():
        found = client.completions.create(model=NAME, prompt=PROMPTS[1], **GREEDY)
        assert found.choices[0].text == alone["greedy"][1]

    named = {"type": "function", "function": {"name": "f"}}
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(parsed, t) for t in (0, 0.9)] + [pool.submit(free) for _ in range(2)]
        assert pool.submit(called, named).result() == "f"
        assert pool.submit(called, "required").result() in ("f", "search")
        for job in jobs:
            job.result()
    found = client.completions.create(
        model=NAME,
        prompt="x = ",
        max_tokens=20,
        extra_body={"structured_outputs": {"regex": "[0-9]{3}"}},
    )
    assert re.fullmatch("[0-9]{3}", found.choices[0].text)
    assert found.choices[0].finish_reason == "stop"


def test_errors_are_the_client_s_own(server, client):
    def ask(**more):
        return client.completions.create(**({"model": NAME, "prompt": "a"} | more))

    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        ask(model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="not there") as caught:
        ask(logprobs=2, echo=True)
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError, match="600") as caught:
        ask(max_tokens=600)
    assert caught.value.code == "context_length_exceeded"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objct"}}}
    with pytest.raises(openai.BadRequestError, match="response_format: Invalid type") as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=schema)
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="no", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_a_stream_that_is_left_frees_its_slot_and_changes_no_other(server, client, alone):
    counts = server.service.scheduler.counts
    aborted = counts.aborted
    found: list[str] = []

    def other():
        answer = client.completions.create(model=NAME, prompt=PROMPTS[1], **GREEDY)
        found.append(answer.choices[0].text)

    thread = threading.Thread(target=other)
    with client.completions.create(
        model=NAME, prompt=PROMPTS[0], stream=True, max_tokens=400, temperature=0,
        extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
        thread.start()
    thread.join(30)
    assert found == [alone["greedy"][1]]
    server.wait_idle()
    assert counts.aborted == aborted + 1
    assert counts.submitted == counts.ended
    # The slot's next request is not disturbed by what was there.
    answers = client.completions.create(model=NAME, prompt=PROMPTS, **GREEDY)
    assert [choice.text for choice in answers.choices] == alone["greedy"]


def test_metrics_tell_of_trees(server):
    text = server.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    drafts = float(values['k26jax_spec_decode_num_drafts_total{model_name="tiny"}'])
    drafted = float(values['k26jax_spec_decode_num_draft_tokens_total{model_name="tiny"}'])
    accepted = float(values['k26jax_spec_decode_num_accepted_tokens_total{model_name="tiny"}'])
    assert drafted == 16 * drafts
    assert drafts < accepted < drafted
    info = server.http.get("/server_info", headers={"authorization": "Bearer key"}).json()
    lengths = {int(length): count for length, count in info["accept_lengths"].items()}
    assert sum(lengths.values()) == drafts
    assert sum((length - 1) * count for length, count in lengths.items()) == accepted
    assert info["rows"] == {"17": drafts}
    assert info["step_costs"] is None
