"""The performance model beside what `bench rank --json` measured, and its costs fitted to that."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from k26jax.bench.costs import Costs
from k26jax.bench.launches import STAGES
from k26jax.bench.perf_model import Setting, alone, part_seconds, predict
from k26jax.bench.published import published
from k26jax.errors import ConfigError

# Widths from which two costs of verification can be told apart.
_FEWEST = 3


@dataclass(frozen=True)
class Compared:
    """One measured row and what the model says of it."""

    width: int
    stage: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """By what share the prediction is too long; negative: too short."""
        return self.predicted_seconds / self.measured_seconds - 1


_SAME = ("config", "layers", "tp_size", "ep_size", "context", "device")


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Returns files that `bench rank --json` wrote of different widths as one.

    The first one's reading rate holds for all.

    Raises: ConfigError if one is none, or they measure different things.
    """
    records = [read_measured(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        for name in _SAME:
            if record.get(name) != records[0].get(name):
                raise ConfigError(
                    f"{path} has {name} {record.get(name)}, and {paths[0]} has "
                    f"{records[0].get(name)}; only widths may differ"
                )
    return {**records[0], "rows": [row for record in records for row in record["rows"]]}


def read_measured(path: Path) -> dict[str, Any]:
    """Returns a file that `bench rank --json` wrote.

    Raises: ConfigError if it is none.
    """
    try:
        record = json.loads(path.read_text())
        rows = record["rows"]
        known = {"config", "layers", "tp_size", "ep_size", "context", "read_bytes_a_second"}
        is_good = known <= record.keys() and all({"stage", "width"} <= row.keys() for row in rows)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of `k26jax bench rank --json` ({error})") from error
    if not is_good or not any(row["stage"] == "step" for row in rows):
        raise ConfigError(f"{path} holds no step of `k26jax bench rank --json`")
    return record


def setting_of(record: dict[str, Any], like: Setting) -> Setting:
    """Returns the setting in which a record was measured, with the costs of another one."""
    model, draft = published(record["config"], record["layers"])
    card = replace(like.card, read_bytes_a_second=record["read_bytes_a_second"])
    touched = {row["width"]: row["touched"] for row in _rows(record, "step")}
    # The record counts the experts of the first rank.
    routing = tuple(sorted((w, n * record["ep_size"]) for w, n in touched.items()))
    return alone(
        replace(
            like, model=model, draft=draft, card=card, tp_size=record["tp_size"],
            ep_size=record["ep_size"], context=record["context"], users=1, routing=routing,
        )
    )  # fmt: skip


def compare(record: dict[str, Any], like: Setting) -> list[Compared]:
    """Returns every measured step and stage of a record beside the prediction for it."""
    setting = setting_of(record, like)
    found = []
    for width in dict.fromkeys(row["width"] for row in record["rows"]):
        step = predict(setting, width)
        said = step.stage_seconds | {"step": step.seconds}
        rows = (row for row in record["rows"] if row["width"] == width)
        found += [
            Compared(width, row["stage"], row["seconds"], said[row["stage"]])
            for row in rows
            if row["stage"] in said
        ]
    return found


def calibrated(record: dict[str, Any], like: Setting) -> Costs:
    """Returns costs that fit a record, beginning at those of a setting.

    Launches as a whole and the reading of experts are fitted to verification, if there are enough
    widths; each stage, and the step as one program of them, then gets the factor that is left.
    """
    setting = setting_of(record, like)
    costs = replace(
        setting.costs,
        stage_factor={},
        read_bytes_a_second=record["read_bytes_a_second"],
        host_seconds=statistics.median(
            row["seconds"] * row["host_share"] for row in _rows(record, "step")
        ),
        source=f"{record.get('device', 'a GPU')}, bench rank of {record['config']}",
    )
    setting = replace(setting, costs=costs)
    rows = _rows(record, "verify")
    if len({row["width"] for row in rows}) >= _FEWEST:
        setting = replace(setting, costs=_fitted(setting, rows))
    factors = {}
    for stage in STAGES:
        ratios = [
            row["seconds"] / predict(setting, row["width"]).stage_seconds[stage]
            for row in _rows(record, stage)
        ]
        if ratios:
            factors[stage] = statistics.median(ratios)
    factors["step"] = _step_factor(record)
    return replace(setting.costs, stage_factor=factors)


def _fitted(setting: Setting, rows: Sequence[dict[str, Any]]) -> Costs:
    """Returns costs with launches and the experts' efficiency fitted, least relative error."""
    costs = setting.costs
    table, wanted = [], []
    for row in rows:
        launches, experts, rest = part_seconds(setting, row["width"], "verify")
        table.append([launches / row["seconds"], experts / row["seconds"]])
        wanted.append(1 - rest / row["seconds"])
    (launch, read), *_ = np.linalg.lstsq(np.array(table), np.array(wanted), rcond=None)
    if min(launch, read) <= 0:
        return costs  # what was measured does not look like the model; factors must do
    return replace(
        costs,
        launch_seconds={name: cost * launch for name, cost in costs.launch_seconds.items()},
        efficiency={
            name: share / read if name.endswith("_moe") else share
            for name, share in costs.efficiency.items()
        },
    )


def _step_factor(record: dict[str, Any]) -> float:
    """Returns how the step, host aside, compares with the sum of its stages; 1 if not measured."""
    ratios = []
    for step in _rows(record, "step"):
        stages = [
            row["seconds"]
            for row in record["rows"]
            if row["width"] == step["width"] and row["stage"] in STAGES
        ]
        expected = 3 if step["width"] == 1 else len(STAGES)
        if len(stages) == expected:
            ratios.append(step["seconds"] * (1 - step["host_share"]) / sum(stages))
    return statistics.median(ratios) if ratios else 1.0


def _rows(record: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["stage"] == stage]


def worst(rows: Sequence[Compared]) -> float:
    """Returns the greatest error of the steps, as a share."""
    return max((abs(row.error) for row in rows if row.stage == "step"), default=0.0)
