"""From folders to models, parameters and tokenizer: stages checkpoint and params.

What is cheap and can be wrong comes first (`prepare`), the weights after it (`load`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import Algorithm, DraftConfig, EngineConfig, ModelConfig, Quantization
from k26jax.engine import arranging
from k26jax.engine.compile_cache import keep_compiled_programs
from k26jax.engine.memory import available_bytes, require_memory, tree_bytes
from k26jax.engine.placement import Placement, place, places_of
from k26jax.engine.request import Request, SamplingParams, make_request, spellings, token_ids_of
from k26jax.engine.step_costs import CostTable, read_costs
from k26jax.errors import CapacityError, KernelError, TokenizerError
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import Params, abstract, arrays
from k26jax.model.target import Target
from k26jax.pallas.gpu import architecture
from k26jax.sharding.distributed import Cluster, join_cluster
from k26jax.sharding.mesh import make_mesh
from k26jax.spec.auto_width import AutoWidth
from k26jax.spec.pages import Caches
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState
from k26jax.text.grammar import NO_GRAMMARS, Grammars
from k26jax.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_CONTEXT = 4096
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Prepared:
    """Everything about an engine but its weights: what can be known in a second.

    models: abstract modules.
    tokenizer: None if the folder has none; then prompts must be token ids.
    eos_ids: the model's own end tokens, from config, generation config and tokenizer.
    context_length: tokens of one sequence.
    placement: how the models are spread over a mesh; None on one device.
    cluster: the processes of the run; None if this is the only one.
    grammars: what shapes answers.
    prefix_pages: pages of the prefix cache; 0: there is none.
    costs: what steps cost, as far as it is known; None where all steps have as many rows.
    """

    config: EngineConfig
    models: Models
    plan: Plan
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    context_length: int
    dtype: jnp.dtype
    placement: Placement | None = None
    cluster: Cluster | None = None
    grammars: Grammars = NO_GRAMMARS
    prefix_pages: int = 0
    costs: CostTable | None = None

    @property
    def leads(self) -> bool:
        """Whether this process takes requests; in a run of several only process 0 does."""
        return self.cluster is None or self.cluster.leads

    def encode(self, prompt: str | Iterable[int]) -> list[int]:
        """Returns a prompt's token ids; special strings in text are plain text.

        Raises: TokenizerError for text without a tokenizer, RequestError for another type.
        """
        if not isinstance(prompt, str):
            return token_ids_of(prompt, "a prompt", expected="text or a list of token ids")
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.config.model_path} holds no tiktoken.model or tokenizer.json; give prompts "
                "as token ids"
            )
        return self.tokenizer.encode(prompt)

    def request(
        self, prompt: str | Iterable[int], params: SamplingParams, *, seed: int = 0
    ) -> Request:
        """Returns the checked request of one sequence.

        Args:
          seed: for params that bring none.

        Raises: RequestError or TokenizerError if the prompt cannot be run.
        """
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)
        return make_request(
            self.encode(prompt),
            params,
            vocab_size=self.models.target.config.vocab_size,
            context_length=self.context_length,
            eos_ids=self.eos_ids,
            seed=seed,
            bad_words=spellings(params.bad_words or (), self.encode),
        )

    @property
    def page_tokens(self) -> int:
        """Tokens of one page of the prefix cache, which is one whole chunk of a prefill."""
        return min(self.config.chunked_prefill_size, self.context_length)

    def empty_state(self) -> SpecState:
        """Returns idle slots."""
        return self._empty(self.config.max_running_requests, self.context_length)

    def make_pages(self) -> Caches:
        """Returns the empty pages of the prefix cache, in their places."""
        places = None if self.placement is None else places_of(self.page_shapes())
        empty = lambda: Caches.of(self._empty(self.prefix_pages, self.page_tokens))  # noqa: E731
        return jax.jit(empty, out_shardings=places)()

    def _empty(self, slots: int, capacity: int) -> SpecState:
        drafter = self.models.drafter
        return SpecState.empty(
            self.models.target.config,
            drafter.config if drafter else None,
            slots=slots,
            capacity=capacity,
            dtype=self.dtype,
            auto=self.costs and AutoWidth.of(*self.costs.arrays),
        )

    def require_memory(self, *, has_cache: bool = False, **needs: int) -> None:
        """Raises CapacityError unless these bytes of a device and the caches fit in its memory.

        Args:
          has_cache: whether the caches are in memory already.
          needs: by name.
        """
        if not has_cache:
            needs |= {"cache": tree_bytes(self.state_shapes())}
            if self.prefix_pages:
                needs |= {"prefix cache": tree_bytes(self.page_shapes())}
        require_memory(
            needs,
            slots=self.config.max_running_requests,
            context_length=self.context_length,
            devices=self.placement and self.placement.local_devices,
        )

    def state_shapes(self) -> SpecState:
        """Returns what stands for the arrays of idle slots, with their places on a mesh."""
        return self._placed(jax.eval_shape(self.empty_state))

    def page_shapes(self, count: int | None = None) -> Caches:
        """Returns what stands for the arrays of the prefix cache, or of another number of pages."""
        count = self.prefix_pages if count is None else count
        pages = jax.eval_shape(lambda: self._empty(count, self.page_tokens))
        return Caches.of(self._placed(pages))

    def _placed(self, shapes: SpecState) -> SpecState:
        return shapes if self.placement is None else self.placement.state_shapes(shapes)

    def weight_bytes(self) -> int:
        """Returns the bytes of weights that each device holds."""
        if self.placement is not None:
            return self.placement.weight_bytes(self.models)
        modules = (self.models.target, self.models.drafter)
        return sum(tree_bytes(arrays(module)) for module in modules if module)


@dataclass(frozen=True, kw_only=True)
class Loaded(Prepared):
    """Everything an engine needs.

    params: the arrays of the models, under "target" and "drafter".
    """

    params: Params


def prepare(config: EngineConfig) -> Prepared:
    """Returns what the configuration and tokenizer files of an engine's folders say.

    Raises: ConfigError, TokenizerError, CapacityError, MeshError or ClusterError.
    """
    folder = Path(config.model_path)
    model_config = ModelConfig.from_folder(folder)
    # JAX looks for devices only once the processes have met.
    cluster = join_cluster(
        config.coordinator_address,
        config.num_processes,
        config.process_id,
        timeout=config.distributed_timeout,
    )
    context_length = _context_length(config, model_config)
    dtype = _dtype(config.dtype)
    tokenizer = _tokenizer(folder, model_config)
    kernels = settle_kernels(config.kernels, model_config, dtype)
    drafter = None
    if config.algorithm is not Algorithm.NONE:
        draft_folder = Path(str(config.speculative_draft_model_path))
        draft_config = DraftConfig.from_folder(draft_folder)
        draft_config.check_target(model_config, str(draft_folder))
        drafter = abstract(lambda rngs: Drafter(draft_config, dtype=dtype, rngs=rngs))
    named = model_config.eos_token_ids + (tokenizer.eos_ids if tokenizer else ())
    eos_ids = tuple(dict.fromkeys(named))
    models = Models(abstract(lambda rngs: Target(model_config, dtype=dtype, rngs=rngs)), drafter)
    plan = _plan(config, drafter, kernels)
    prepared = Prepared(
        config=config,
        models=models,
        plan=plan,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        context_length=context_length,
        dtype=dtype,
        placement=place(make_mesh(_tp_size(config, cluster), config.ep_size), models),
        cluster=cluster,
        grammars=Grammars(tokenizer, model_config.vocab_size, eos_ids),
        costs=_costs(config, plan, context_length),
    )
    return replace(prepared, prefix_pages=_prefix_pages(prepared))


def load(prepared: Prepared, progress: Progress | None = None) -> Loaded:
    """Returns an engine's loaded models.

    Args:
      progress: called with (what, bytes done, bytes in all) while weights are read.

    Raises: CheckpointError or CapacityError, before any weight is read where the fault can be
      seen in the files' headers.
    """
    config, models = prepared.config, prepared.models
    turns = []
    if prepared.plan.kernels == "pallas":
        turns = list(arranging.turns(models.target, prepared.placement))
    weights = prepared.weight_bytes()
    prepared.require_memory(weights=weights)
    if turns:
        # Before there is a cache.
        twice = max(turn.new_bytes for turn in turns)
        prepared.require_memory(
            has_cache=True, weights=weights, **{"experts in a second layout": twice}
        )
    keep_compiled_programs(config.compile_cache_dir)
    params = {}
    if models.drafter:
        folder = Path(str(config.speculative_draft_model_path))
        params["drafter"] = _load_arrays(folder, prepared, "drafter", progress)
    params["target"] = _load_arrays(Path(config.model_path), prepared, "target", progress)
    for turn in turns:
        params["target"] = arranging.run(turn, params["target"])
        models = Models(turn.target, models.drafter)
        prepared = replace(prepared, models=models, placement=turn.placement)
    return Loaded(**vars(prepared), params=params)


def without_drafter(loaded: Loaded) -> Loaded:
    """Returns the same target, its arrays shared, for plain decoding.

    Raises: CapacityError if there is no room for its cache.
    """
    plain = replace(
        loaded,
        config=replace(loaded.config, speculative_algorithm=Algorithm.NONE.value),
        models=Models(loaded.models.target),
        params={"target": loaded.params["target"]},
        plan=Plan.plain(loaded.plan.kernels),
        costs=None,
        placement=loaded.placement and loaded.placement.without_drafter(),
    )
    plain.require_memory()
    return plain


def _load_arrays(folder: Path, prepared: Prepared, what: str, progress: Progress | None) -> Params:
    module = getattr(prepared.models, what)
    where = {"sharding_for": prepared.placement.sharding_for(what)} if prepared.placement else {}
    layers = module.config.num_hidden_layers if what == "target" else None
    with open_checkpoint(folder, num_hidden_layers=layers) as checkpoint:
        total, done = checkpoint.total_bytes(), 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(what, done, total)

        return load_params(checkpoint, module, progress=advance, **where)


def _tp_size(config: EngineConfig, cluster: Cluster | None) -> int:
    if config.tp_size is not None:
        return config.tp_size
    return max(jax.device_count() // config.ep_size, 1) if cluster else 1


def settle_kernels(choice: str, model_config: ModelConfig, dtype: jnp.dtype) -> str:
    """Returns the implementation to run; "auto" takes the GPU kernels where they apply.

    Raises: KernelError if the kernels were asked for and have no layout for the experts.
    """
    has_layout = (
        not model_config.moe_layer_ids or model_config.quantization is Quantization.INT4_EXPERTS
    )
    if choice == "pallas" and not has_layout:
        raise KernelError(
            f"{model_config.model_type}: routed experts in {dtype.name} have no kernel, only INT4 "
            "ones do; use kernels='auto' or 'reference'"
        )
    if choice != "auto":
        return choice
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
    budget = config.speculative_ddtree_budget
    if isinstance(budget, str):
        return Plan.auto(config.ddtree_widths, depth, block_size, kernels)
    return Plan.tree(budget, depth, block_size, kernels)


def _costs(config: EngineConfig, plan: Plan, context_length: int) -> CostTable | None:
    if not plan.widths:
        return None
    if config.speculative_cost_table is None:
        return CostTable.unknown(plan.widths, context_length)
    return read_costs(config.speculative_cost_table, plan.widths)


def _prefix_pages(prepared: Prepared) -> int:
    """Returns the pages that the options ask for.

    Without a number: as many as the slots hold, or half of the memory that weights and slots leave
    where that is less. Processes of one run, which may see unlike memory, take what the slots hold.
    """
    config, size = prepared.config, prepared.page_tokens
    if not config.enable_prefix_caching:
        return 0
    if config.prefix_cache_tokens is not None:
        if config.prefix_cache_tokens < size:
            raise CapacityError(
                f"prefix_cache_tokens = {config.prefix_cache_tokens} is less than one page of "
                f"{size} tokens (a chunk of a prefill); give more, or a smaller "
                "chunked_prefill_size"
            )
        return config.prefix_cache_tokens // size
    most = config.max_running_requests * prepared.context_length // size
    available = available_bytes(prepared.placement and prepared.placement.local_devices)
    if available is None or prepared.cluster is not None:
        return most
    left = available - prepared.weight_bytes() - tree_bytes(prepared.state_shapes())
    return max(min(most, left // 2 // tree_bytes(prepared.page_shapes(1))), 0)


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
