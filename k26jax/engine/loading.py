"""From folders to models, parameters and tokenizer on the device: stages checkpoint and params."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import Algorithm, DraftConfig, EngineConfig, ModelConfig, Quantization
from k26jax.engine.compile_cache import keep_compiled_programs
from k26jax.errors import CapacityError, KernelError, TokenizerError
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import Params, abstract
from k26jax.model.target import Target, arranged
from k26jax.pallas.gpu import architecture
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models
from k26jax.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_CONTEXT = 4096
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Loaded:
    """Everything an engine needs.

    models: abstract modules; `params` holds their arrays under "target" and "drafter".
    tokenizer: None if the folder has none; then prompts must be token ids.
    eos_ids: the model's own end tokens, from config, generation config and tokenizer.
    context_length: tokens of one sequence.
    """

    config: EngineConfig
    models: Models
    params: Params
    plan: Plan
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    context_length: int
    dtype: jnp.dtype


def load(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Returns the loaded models of an engine configuration.

    Args:
      progress: called with (what, bytes done, bytes in all) while weights are read.

    Raises: ConfigError, CheckpointError, TokenizerError or CapacityError, before any weight is
      used where the fault can be seen in the files' headers.
    """
    keep_compiled_programs(config.compile_cache_dir)
    folder = Path(config.model_path)
    model_config = ModelConfig.from_folder(folder)
    context_length = _context_length(config, model_config)
    dtype = _dtype(config.dtype)
    tokenizer = _tokenizer(folder, model_config)
    params = {}
    target = abstract(lambda rngs: Target(model_config, dtype=dtype, rngs=rngs))
    drafter = None
    if config.algorithm is not Algorithm.NONE:
        draft_folder = Path(str(config.speculative_draft_model_path))
        draft_config = DraftConfig.from_folder(draft_folder)
        draft_config.check_target(model_config, str(draft_folder))
        drafter = abstract(lambda rngs: Drafter(draft_config, dtype=dtype, rngs=rngs))
        params["drafter"] = _load_arrays(draft_folder, drafter, None, "drafter", progress)
    layers = model_config.num_hidden_layers
    params["target"] = _load_arrays(folder, target, layers, "target", progress)
    kernels = _kernels(config.kernels, model_config, dtype)
    if kernels == "pallas":
        target, params["target"] = arranged(target, params["target"])
    eos_ids = model_config.eos_token_ids + (tokenizer.eos_ids if tokenizer else ())
    return Loaded(
        config=config,
        models=Models(target, drafter),
        params=params,
        plan=_plan(config, drafter, kernels),
        tokenizer=tokenizer,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        context_length=context_length,
        dtype=dtype,
    )


def without_drafter(loaded: Loaded) -> Loaded:
    """Returns the same target, its arrays shared, for plain decoding."""
    return replace(
        loaded,
        config=replace(loaded.config, speculative_algorithm=Algorithm.NONE.value),
        models=Models(loaded.models.target),
        params={"target": loaded.params["target"]},
        plan=Plan.plain(loaded.plan.kernels),
    )


def _load_arrays(
    folder: Path, module: Any, layers: int | None, what: str, progress: Progress | None
) -> Params:
    with open_checkpoint(folder, num_hidden_layers=layers) as checkpoint:
        total, done = checkpoint.total_bytes(), 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(what, done, total)

        return load_params(checkpoint, module, progress=advance)


def _kernels(choice: str, model_config: ModelConfig, dtype: jnp.dtype) -> str:
    """Returns the implementation to run; "auto" takes the GPU kernels where they apply."""
    if choice != "auto":
        return choice
    has_layout = model_config.quantization is Quantization.INT4_EXPERTS
    if jax.default_backend() != "gpu" or dtype != jnp.bfloat16 or not has_layout:
        return "reference"
    try:
        architecture()
    except KernelError:
        return "reference"
    return "pallas"


def _plan(config: EngineConfig, drafter: Drafter | None, kernels: str) -> Plan:
    if drafter is None:
        return Plan.plain(kernels)
    block_size = config.speculative_dflash_block_size or drafter.config.block_size
    depth = drafter.config.depth_of(block_size)
    if config.algorithm is Algorithm.DFLASH:
        return Plan.chain(depth, block_size, kernels)
    return Plan.tree(config.speculative_ddtree_budget, depth, block_size, kernels)


def _context_length(config: EngineConfig, model_config: ModelConfig) -> int:
    most = model_config.max_position_embeddings
    if config.context_length is None:
        return min(most, DEFAULT_CONTEXT)
    if config.context_length > most:
        raise CapacityError(
            f"context_length = {config.context_length} exceeds the model's {most} positions; "
            f"give at most {most}"
        )
    return config.context_length


def _dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _tokenizer(folder: Path, model_config: ModelConfig) -> Tokenizer | None:
    if not any((folder / name).is_file() for name in ("tiktoken.model", "tokenizer.json")):
        return None
    return load_tokenizer(folder, model_config.vocab_size)


def require_tokenizer(tokenizer: Tokenizer | None, folder: str) -> Tokenizer:
    """Returns the tokenizer.

    Raises: TokenizerError if the folder has none, saying what can be done without.
    """
    if tokenizer is None:
        raise TokenizerError(
            f"{folder} holds no tiktoken.model or tokenizer.json; give prompts as token ids"
        )
    return tokenizer
