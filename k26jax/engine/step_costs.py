"""What a step of each width takes here: read from a file, remembered, or measured.

A table is JSON: {"contexts": [32], "milliseconds": {"plain": [4.1], "1": [6.0], "8": [17.2]}}. One
number a context in each list; "plain" is a step without a draft, a number of rows one with it.
Between contexts costs are interpolated, beyond them they are those of the nearest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from k26jax.engine.compile_cache import folder_in_use
from k26jax.engine.request import Request, SamplingParams
from k26jax.errors import ConfigError

if TYPE_CHECKING:
    from k26jax.engine.loading import Prepared
    from k26jax.engine.runner import Runner

PLAIN = "plain"
_NEVER_MS = 1e30
_FOLDER = "step_costs"
# Rounds of measuring: the least of each choice counts, so what else runs here does less harm. The
# later ones are left out on a machine so slow that they would hold up the start.
_ROUNDS, _FEWEST, _SECONDS = 8, 3, 6.0
_PROMPT = 32
# Longer contexts than this have a second point: attention grows with the context, by rows.
_FAR = 8192


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a step by choice and context.

    widths: rows of a drafted step, ascending.
    contexts: tokens in the cache, ascending.
    milliseconds: for each context, of a plain step and of each width's.
    """

    widths: tuple[int, ...]
    contexts: tuple[float, ...]
    milliseconds: tuple[tuple[float, ...], ...]

    @classmethod
    def unknown(cls, widths: Sequence[int], context_length: int) -> CostTable:
        """Returns the table before anything is known, with as many contexts as are measured."""
        contexts = (0.0, float(context_length)) if context_length > _FAR else (0.0,)
        return cls(tuple(widths), contexts, ((1.0,) * (len(widths) + 1),) * len(contexts))

    @classmethod
    def from_record(cls, record: Any, widths: Sequence[int], name: str) -> CostTable:
        """Returns the table that a file holds, of these widths.

        Args:
          name: of the file, for messages.

        Raises: ConfigError if it is none, or lacks a width.
        """
        names = [PLAIN, *map(str, widths)]
        try:
            contexts = np.asarray(record["contexts"], float)
            found = record["milliseconds"]
            missing = [name for name in names if name not in found]
            columns = [np.asarray(found[name], float) for name in names if name in found]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{name} is no table of step costs ({error}); expected "
                '{"contexts": [32], "milliseconds": {"plain": [4.1], "1": [6.0], "8": [17.2]}}'
            ) from None
        if missing:
            raise ConfigError(
                f"{name} has no milliseconds of {', '.join(missing)}; it has "
                f"{', '.join(map(str, found))}; add them or give --speculative-ddtree-widths"
            )
        if contexts.ndim != 1 or not len(contexts) or (np.diff(contexts) <= 0).any():
            raise ConfigError(f"{name}: contexts are {contexts.tolist()}, expected ascending")
        for label, column in zip(names, columns, strict=True):
            if column.shape != contexts.shape or not (np.isfinite(column) & (column > 0)).all():
                raise ConfigError(
                    f"{name}: milliseconds of {label} are {column.tolist()}, expected one positive "
                    f"number for each of {len(contexts)} contexts"
                )
        rows = np.stack(columns, axis=1).tolist()
        return cls(tuple(widths), tuple(contexts.tolist()), tuple(map(tuple, rows)))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Contexts and milliseconds, as the device takes them."""
        return np.asarray(self.contexts, np.float32), np.asarray(self.milliseconds, np.float32)

    def record(self) -> dict[str, Any]:
        """Returns what a file holds: `from_record`'s counterpart."""
        columns = zip(*self.milliseconds, strict=True)
        names = [PLAIN, *map(str, self.widths)]
        return {
            "contexts": list(self.contexts),
            "milliseconds": {n: list(c) for n, c in zip(names, columns, strict=True)},
        }

    def only(self, choice: int) -> CostTable:
        """Returns a table by which every step makes one choice (0: plain, i: the i-th width)."""
        one = tuple(1.0 if i == choice else _NEVER_MS for i in range(len(self.widths) + 1))
        return dataclasses.replace(self, milliseconds=(one,) * len(self.contexts))


def read_costs(path: str, widths: Sequence[int]) -> CostTable:
    """Returns the table of a file.

    Raises: ConfigError if it cannot be read, is none or lacks a width.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"speculative_cost_table = {path!r} cannot be read: {error}") from None
    return CostTable.from_record(record, widths, str(path))


def settle_costs(runner: Runner, loaded: Prepared) -> CostTable:
    """Returns the costs that a runner goes by from now on: the file's, else kept, else measured.

    Cost: measured, one dispatch for each choice, three to eight times over.
    """
    costs = loaded.costs
    assert costs is not None
    if loaded.config.speculative_cost_table is None:
        kept = _kept_file(loaded)
        costs = _recall(kept, loaded.plan.widths)
        if costs is None:
            costs = measure(runner, loaded)
            _keep(kept, costs)
    runner.set_costs(costs)
    return costs


def measure(runner: Runner, loaded: Prepared) -> CostTable:
    """Returns the milliseconds that steps of this runner take, whose slots must be idle.

    All slots are busy, each with random tokens, so that rows choose different experts. In a long
    context what attention adds is the difference of two runs over an empty cache.
    """
    unknown = CostTable.unknown(loaded.plan.widths, loaded.context_length)
    room = loaded.config.steps_per_dispatch * (loaded.plan.depth + 1)
    length = _prompt_length(loaded)
    far = loaded.context_length - room - 1
    near = _seconds(runner, unknown, functools.partial(_prefill, runner, loaded))
    if len(unknown.contexts) == 1:
        contexts, rows = (float(length),), [near]
    else:
        short, long = (
            _seconds(runner, unknown, functools.partial(runner.occupy, length=n, max_tokens=room))
            for n in (length, far)
        )
        contexts = float(length), float(far)
        rows = [near, near + np.maximum(long - short, 0)]
    runner.flush()  # where pages are short, they hold random prompts now
    milliseconds = tuple(tuple((1e3 * row).tolist()) for row in rows)
    return CostTable(unknown.widths, contexts, milliseconds)


def _seconds(runner: Runner, unknown: CostTable, begin: Callable[[int], None]) -> np.ndarray:
    """Returns the seconds of a step for each choice, after `begin` has made every slot busy."""
    least = np.full(len(unknown.widths) + 1, np.inf)
    begun = time.perf_counter()
    for turn, choice in itertools.product(range(_ROUNDS), range(len(least))):
        if turn >= _FEWEST and time.perf_counter() - begun > _SECONDS:
            break
        runner.set_costs(unknown.only(choice))
        for slot in range(runner.slots):
            begin(slot)
        started = time.perf_counter()
        n_run = int(runner.run(1 << 10).n_run)
        least[choice] = min(least[choice], (time.perf_counter() - started) / n_run)
        for slot in range(runner.slots):
            runner.release(slot)
    # Disturbances only add, and fewer rows take no longer than more.
    return np.minimum.accumulate(least[::-1])[::-1]


def _prompt_length(loaded: Prepared) -> int:
    return min(_PROMPT, max(loaded.context_length // 4, 1))


def _prefill(runner: Runner, loaded: Prepared, slot: int) -> None:
    vocab = loaded.models.target.config.vocab_size
    length = _prompt_length(loaded)
    tokens = np.random.default_rng(slot).integers(0, vocab, length)
    room = loaded.context_length - length
    request = Request(tuple(tokens.tolist()), SamplingParams(temperature=0), room, (), slot)
    runner.prefill(slot, request)


def _kept_file(loaded: Prepared) -> Path | None:
    """Returns where the costs of this engine on this machine are kept; None: nowhere."""
    folder = folder_in_use()
    if folder is None:
        return None
    config, models, device = loaded.config, loaded.models, jax.devices()[0]
    drafter = models.drafter and models.drafter.config
    what = {
        "device": f"{device.platform} {device.device_kind} x {jax.device_count()}",
        "processors": os.cpu_count(),
        "models": f"{models.target.config} {drafter}",
        "plan": str(loaded.plan),
        "engine": f"{loaded.dtype} {loaded.context_length} {config.max_running_requests} "
        f"{config.tp_size} {config.ep_size} {config.steps_per_dispatch}",
        "jax": jax.__version__,
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]
    return Path(folder) / _FOLDER / f"{key}.json"


def _recall(kept: Path | None, widths: Sequence[int]) -> CostTable | None:
    if kept is None or not kept.is_file():
        return None
    try:
        return CostTable.from_record(json.loads(kept.read_text()), widths, str(kept))
    except (OSError, ValueError, ConfigError):
        return None


def _keep(kept: Path | None, costs: CostTable) -> None:
    """Writes the costs at once or not at all; a folder that cannot be written costs a start."""
    if kept is None:
        return
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(costs.record()))
        new.replace(kept)
    except OSError:
        return
