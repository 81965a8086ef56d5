"""What is taken is compared with what there is, before it is taken."""

from __future__ import annotations

import jax
import pytest

from k26jax import LLM, SamplingParams
from k26jax.config import EngineConfig
from k26jax.engine import memory
from k26jax.engine.loading import load, prepare, without_drafter
from k26jax.engine.memory import host_available_bytes, require_memory, tree_bytes
from k26jax.engine.runner import Runner
from k26jax.errors import CapacityError

LIMIT = 4 << 20


@pytest.fixture
def host(tmp_path):
    """A function that writes the files in which Linux says what memory there is."""

    def write(meminfo=None, own=None, **groups):
        for name, text in (("proc/meminfo", meminfo), ("proc/self/cgroup", own)):
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
        for name, (limit, used, stat) in groups.items():
            folder = tmp_path / "sys/fs/cgroup" / name.replace("__", "/").removeprefix("root")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(stat)
        return host_available_bytes(tmp_path)

    return write


MEMINFO = "MemTotal:       900 kB\nMemFree:   5 kB\nMemAvailable:     700 kB\nHugePages_Total: 0\n"
STAT = "anon 5000\nactive_file 300\ninactive_file 700\n"


def test_memory_of_a_host(host):
    assert host() is None
    assert host(meminfo=MEMINFO) == 700 * 1024


def test_memory_of_a_control_group(host):
    assert host(root=(10_000, 6_000, STAT)) == 5_000
    assert host(meminfo=MEMINFO) == 5_000
    assert host(root=(800 * 1024, 0, STAT)) == 700 * 1024
    assert host(root=("max", 6_000, STAT)) == 700 * 1024
    assert host(root=(1_000, 3_000, STAT)) == 0


def test_every_group_around_the_process_counts(host):
    own = "9:memory:/old\n0::/outer/inner\n"
    assert host(own=own, outer=(9_000, 1_000, ""), outer__inner=("max", 1, "")) == 8_000
    assert host(outer__inner=(500, 100, "")) == 400
    assert host(own="0::/../elsewhere\n", root=(60, 10, "")) == 50


def test_memory_of_an_accelerator(monkeypatch):
    class Device:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    for stats, expected in (
        ({"bytes_limit": 90, "bytes_in_use": 20}, 70),
        ({"bytes_in_use": 20}, None),
        (None, None),
    ):
        monkeypatch.setattr(jax, "local_devices", lambda stats=stats: [Device(stats)])
        assert memory.available_bytes() == expected


def test_the_message_has_the_numbers_and_what_to_lower(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 8_000_000_000)
    require_memory({"weights": 4_000_000_000, "cache": 4_000_000_000}, slots=3, context_length=9)
    with pytest.raises(CapacityError) as caught:
        require_memory({"weights": 2_500_000, "cache": 9_000_000_000}, slots=3, context_length=9)
    assert str(caught.value) == (
        "9 GB of memory are needed (weights 2.5 MB, cache 9 GB), but 8 GB are available; "
        "lower --max-running-requests (now 3) or --context-length (now 9)"
    )
    with pytest.raises(CapacityError, match=r"weights alone do not fit"):
        require_memory({"weights": 9_000_000_000, "cache": 1}, slots=3, context_length=9)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: None)
    require_memory({"weights": 1 << 60}, slots=3, context_length=9)


@pytest.mark.parametrize(
    "changes", [{"max_running_requests": 1000}, {"max_running_requests": 64, "context_length": 99}]
)
def test_a_cache_that_does_not_fit_is_refused_before_anything_is_read(
    small_pair, monkeypatch, changes
):
    """Bug: the system killed the process."""
    monkeypatch.setattr(memory, "available_bytes", lambda *_: LIMIT)
    prepared = prepare(EngineConfig(**small_pair.options | changes))
    with pytest.raises(CapacityError, match=r"weights .* MB, cache .*"):
        load(prepared, lambda *_: pytest.fail("read"))


def test_131_133_the_estimate_is_what_an_engine_takes_with_the_longest_prompt_too(
    small_pair, compile_cache, monkeypatch
):
    needs = []
    monkeypatch.setattr(
        "k26jax.engine.loading.require_memory", lambda found, **_: needs.append(dict(found))
    )
    with LLM(**small_pair.options) as llm:
        params, state = llm.engine.loaded.params, llm.engine.runner._state
        assert needs[0] == {"weights": tree_bytes(params), "cache": tree_bytes(state)}
        # Each program needs room beside the cache, which is made after them.
        programs = needs[1:]
        assert len(programs) == len(llm.engine.runner.programs)
        assert {need["cache"] for need in programs} == {needs[0]["cache"]}
        assert max(need["program"] for need in programs) > 0
        context = llm.engine.loaded.context_length
        for length in (2, context - 1):
            llm.generate([[1] * length], SamplingParams(max_tokens=1))
            held = sum(array.nbytes for array in jax.live_arrays())
            least = held if length == 2 else least
        assert held == least
        assert tree_bytes(llm.engine.runner._state) == needs[0]["cache"]
        needs.clear()
        llm.logits([1])
        assert [need.keys() for need in needs] == [{"program"}]
        needs.clear()
        assert without_drafter(llm.engine.loaded).models.drafter is None
        assert needs[0].keys() == {"cache"}
        assert 0 < needs[0]["cache"] < tree_bytes(state)


def test_a_program_that_does_not_fit_is_refused_before_the_cache_is_made(
    small_pair, compile_cache, monkeypatch
):
    prepared = prepare(EngineConfig(**small_pair.options | {"max_running_requests": 64}))
    cache = tree_bytes(jax.eval_shape(prepared.empty_state))
    loaded = load(prepared)
    monkeypatch.setattr(memory, "available_bytes", lambda *_: cache + 1)
    runner = Runner(loaded)
    with pytest.raises(CapacityError, match=r"program .* MB, cache"):
        runner.warm_up()
    assert runner._state is None
