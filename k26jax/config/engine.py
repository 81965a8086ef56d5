"""What the user asks of the engine: one record for the Python API and the command line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from k26jax.errors import RequestError, nearest

MAX_BUDGET = 254
MAX_STOP_IDS = 16
MAX_LOGPROBS = 20  # most likely tokens that are told beside each token
MAX_LOGIT_BIAS = 300  # tokens with a bias, of one request
MAX_BAD_WORDS = 64  # spellings of bad words, of one request
MAX_BAD_WORD_TOKENS = 16  # tokens of one spelling
AUTO = "auto"
_WIDTHS = (1, 2, 4, 8, 16, 32)
# Rows of one step, all sequences together, up to which a width is compiled unasked.
_MOST_ROWS = 256


class Algorithm(Enum):
    """How tokens are proposed; the emitted tokens are the same under all three."""

    NONE = "NONE"
    DFLASH = "DFLASH"
    DDTREE = "DDTREE"


def option(default: Any, help_text: str, **extra: Any) -> Any:
    """Returns a dataclass field whose help text the command line shows."""
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True)
class EngineConfig:
    """Options of `LLM` and of every command that loads a model."""

    model_path: str = option(
        "", "model folder (Hugging Face layout)", aliases=["--model"], is_path=True
    )
    speculative_draft_model_path: str | None = option(
        None,
        "DFlash drafter folder",
        aliases=["--speculative-draft-model", "--draft-model"],
        is_path=True,
    )
    speculative_algorithm: str | None = option(
        None, "DDTREE, DFLASH or NONE; default: DDTREE if a drafter is given, else NONE"
    )
    speculative_ddtree_budget: int | str = option(
        16,
        "tree nodes without the root, 0 to 254; auto: each step as many as pay, from what the "
        "drafter is sure of and what steps cost here",
        aliases=["--ddtree-budget"],
    )
    speculative_ddtree_widths: str = option(
        "auto",
        "rows of a step, root included, among which a budget of auto chooses, such as 1,4,8,16; "
        "each is compiled; auto: 1,2,4,8,16,32 as far as they fit the running requests",
    )
    speculative_cost_table: str | None = option(
        None,
        "JSON file of what steps cost, for a budget of auto; default: measured at the first start "
        "and kept beside the compiled programs",
        is_path=True,
    )
    speculative_dflash_block_size: int | None = option(
        None, "rows of one draft pass; default: the drafter's own"
    )
    dtype: str = option(
        "auto",
        "float32 or bfloat16; auto: bfloat16 on an accelerator, float32 on the CPU, "
        "where bfloat16 is emulated",
        choices=["auto", "float32", "bfloat16"],
    )
    kernels: str = option(
        "auto",
        "reference (plain JAX) or pallas; auto: the fastest that runs here",
        choices=["auto", "reference", "pallas"],
    )
    tp_size: int | None = option(
        None,
        "devices that share every layer (mesh axis model); default: 1, or all devices of a run of "
        "several processes",
        aliases=["--tensor-parallel-size", "-tp"],
    )
    ep_size: int = option(
        1,
        "groups of devices that share out the routed experts (mesh axis expert); a run takes "
        "tp-size times ep-size devices",
        aliases=["--expert-parallel-size", "-ep"],
    )
    coordinator_address: str | None = option(
        None,
        "host:port of process 0, for a run of several processes or hosts; auto: as the cluster's "
        "launcher says (Slurm, Open MPI, Kubernetes)",
        aliases=["--dist-init-addr"],
    )
    num_processes: int | None = option(
        None, "processes of the run; with a coordinator address", aliases=["--nnodes"]
    )
    process_id: int | None = option(
        None, "number of this process, from 0; process 0 leads", aliases=["--node-rank"]
    )
    distributed_timeout: int = option(
        60, "seconds after which a process that died or hangs ends the run of several"
    )
    context_length: int | None = option(
        None,
        "tokens of one sequence, prompt and output; default: the model's limit, at most 4096",
        aliases=["--max-model-len", "--max-seq-len"],
    )
    max_running_requests: int = option(
        1,
        "sequences decoded together; a step costs as much as for all of them, however few run",
        aliases=["--max-num-seqs"],
    )
    chunked_prefill_size: int = option(256, "prompt tokens of one prefill pass")
    enable_prefix_caching: bool = option(
        False, "keep what prompts leave in the caches, for prompts that begin the same"
    )
    prefix_cache_tokens: int | None = option(
        None,
        "prompt tokens that are kept; default: as many as the slots hold, less where memory is "
        "short",
    )
    steps_per_dispatch: int = option(8, "decoding steps run on the device before the host looks")
    compile_cache_dir: str = option(
        "auto",
        "folder of compiled programs, for a faster next start; auto: in the user's cache folder, "
        "none: keep nothing",
        is_path=True,
    )
    seed: int = option(0, "seed of requests that bring none", aliases=["--random-seed"])

    def __post_init__(self) -> None:
        self._check_strings()
        self.algorithm  # noqa: B018 - refuses an unknown name
        optional = {item.name for item in fields(self) if item.default is None}
        for name, low, high in (
            ("speculative_ddtree_budget", 0, MAX_BUDGET),
            ("speculative_dflash_block_size", 2, 1 << 10),
            ("tp_size", 1, 1 << 16),
            ("ep_size", 1, 1 << 16),
            ("num_processes", 1, 1 << 16),
            ("process_id", 0, 1 << 16),
            ("distributed_timeout", 2, 1 << 20),
            ("context_length", 2, 1 << 30),
            ("max_running_requests", 1, 4096),
            ("chunked_prefill_size", 1, 1 << 20),
            ("prefix_cache_tokens", 1, 1 << 40),
            ("steps_per_dispatch", 1, 1024),
            ("seed", -(1 << 63), (1 << 64) - 1),
        ):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if name == "speculative_ddtree_budget" and value == AUTO:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                auto = ", or 'auto'" if name == "speculative_ddtree_budget" else ""
                raise RequestError(
                    f"{name} = {value!r}, expected an integer from {low} to {high}{auto}"
                )
        if not isinstance(self.enable_prefix_caching, bool):
            raise RequestError(
                f"enable_prefix_caching = {self.enable_prefix_caching!r}, expected true or false"
            )
        self._check_auto()
        self._check_processes()
        for item in fields(self):
            choices = item.metadata.get("choices")
            if choices and getattr(self, item.name) not in choices:
                raise RequestError(
                    f"{item.name} = {getattr(self, item.name)!r}, expected one of {choices}"
                )

    def _check_auto(self) -> None:
        """Raises RequestError for widths that are none, or options that a fixed budget ignores."""
        self.ddtree_widths  # noqa: B018 - refuses what is no list of widths
        if self.speculative_ddtree_budget == AUTO:
            return
        for name, default in (
            ("speculative_ddtree_widths", AUTO),
            ("speculative_cost_table", None),
        ):
            if getattr(self, name) != default:
                raise RequestError(
                    f"{name} = {getattr(self, name)!r} means something for "
                    f"speculative_ddtree_budget = 'auto' alone, which is "
                    f"{self.speculative_ddtree_budget}"
                )

    @property
    def ddtree_widths(self) -> tuple[int, ...]:
        """Rows of a step among which a budget of "auto" chooses, ascending; 1 is always there.

        Raises: RequestError if they are no list of widths.
        """
        text = self.speculative_ddtree_widths
        if text == AUTO:
            most = max(_MOST_ROWS // self.max_running_requests, 2)
            return tuple(width for width in _WIDTHS if width <= most)
        words = [word.strip() for word in text.split(",")]
        good = all(word.isdecimal() and 1 <= int(word) <= MAX_BUDGET + 1 for word in words)
        widths = {1, *map(int, words)} if good else {1}
        if len(widths) == 1:
            raise RequestError(
                f"speculative_ddtree_widths = {text!r}, expected rows from 1 to {MAX_BUDGET + 1}, "
                "at least one of them above 1, such as '1,4,8,16', or 'auto'"
            )
        return tuple(sorted(widths))

    def _check_processes(self) -> None:
        """Raises RequestError unless the options of a run of several processes fit together."""
        address, count, number = self.coordinator_address, self.num_processes, self.process_id
        if address == "auto":
            return
        given = {"coordinator_address": address, "num_processes": count, "process_id": number}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return
        if missing:
            raise RequestError(
                f"{' and '.join(missing)} missing: a run of several processes takes "
                f"{', '.join(given)}, or coordinator_address = 'auto' under a cluster's launcher"
            )
        match = re.fullmatch(r".+:([0-9]{1,5})", str(address))
        if not match or not 0 < int(match[1]) < 1 << 16:
            raise RequestError(
                f"coordinator_address = {address!r}, expected host:port, with a port from 1 to "
                "65535, or 'auto'"
            )
        if number is not None and count is not None and number >= count:
            raise RequestError(
                f"process_id = {number}, expected 0 to {count - 1}: num_processes = {count}"
            )

    def _check_strings(self) -> None:
        """Raises RequestError for text that is empty or something else; paths become text."""
        for item in fields(self):
            # `choices` are checked as such.
            if item.type not in ("str", "str | None") or item.metadata.get("choices"):
                continue
            value = getattr(self, item.name)
            is_path = bool(item.metadata.get("is_path"))
            if is_path and isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, item.name, value)
            if value is None and item.default is None:
                continue
            if not isinstance(value, str) or not value:
                expected = "the path of a folder" if is_path else "text"
                raise RequestError(
                    f"{item.name} = {value!r}, expected {expected}: {item.metadata['help']}"
                )

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force.

        Raises: RequestError for an unknown name, or a drafting algorithm without a drafter.
        """
        name = self.speculative_algorithm
        has_drafter = self.speculative_draft_model_path is not None
        if name is None:
            return Algorithm.DDTREE if has_drafter else Algorithm.NONE
        try:
            algorithm = Algorithm(str(name).upper())
        except ValueError:
            known = [item.value for item in Algorithm]
            raise RequestError(
                f"speculative_algorithm {name!r} is unknown, expected one of {known}"
                + nearest(str(name).upper(), known)
            ) from None
        if algorithm is not Algorithm.NONE and not has_drafter:
            raise RequestError(
                f"speculative_algorithm {algorithm.value} needs speculative_draft_model_path"
            )
        return algorithm
