"""The checks of `k26jax doctor`: each says what it found, and if that is not well what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from k26jax import __version__
from k26jax.checkpoint.summary import summarize
from k26jax.commands.serve import generation_defaults, require_packages
from k26jax.config import Algorithm, DraftConfig, EngineConfig, ModelConfig
from k26jax.engine.compile_cache import OFF, folder_of, try_folder
from k26jax.engine.loading import Prepared, prepare
from k26jax.engine.memory import available_bytes, host_available_bytes, tree_bytes
from k26jax.errors import CheckpointError, K26Error, KernelError, TokenizerError
from k26jax.pallas.gpu import OLDEST_JAX, architecture
from k26jax.text.chat import chat_format
from k26jax.text.tokenizer import Tokenizer, load_tokenizer

OK, WARN, FAIL = "ok", "warn", "fail"
_PACKAGES = ("jaxlib", "flax", "orbax-checkpoint", "safetensors", "tiktoken", "tokenizers")
_SAMPLE = 'def f(x): return "é中文😀\u200d🔧 \t\n\r\n  end" # 0x1F <|im_end|>'
_TIGHT = 0.95
_INSTALL = "install what is named there"
_RESTORE = "restore the folder's files; `k26jax verify` reads every byte of them"


@dataclass(frozen=True)
class Check:
    """What one check found.

    status: "ok", "warn" (it starts, but not as it should) or "fail" (it does not start).
    fix: what to do, unless all is well.
    exit_code: of a start that fails for this.
    """

    name: str
    status: str
    text: str
    fix: str | None = None
    exit_code: int = 0


def checks(options: dict[str, Any], host: str, port: int) -> Iterator[Check]:
    """Yields all checks, one after the other; those of a model only if there is one.

    Args:
        options: of the engine; without model_path this machine alone is looked at.
    """
    yield _versions()
    yield _server()
    yield _guarded("port", lambda: _port(host, port), "choose another --port")
    is_there = yield from _devices()
    yield _compile_cache(options)
    if "model_path" not in options:
        yield Check("model", OK, "none given; k26jax doctor MODEL looks at one")
        return
    folder = Path(options["model_path"])
    yield from _files("files", folder)
    try:
        config = ModelConfig.from_folder(folder)
    except K26Error:
        return  # which the line above has said
    tokenizer = None
    try:
        tokenizer = _load_tokenizer(folder, config)
    except K26Error as error:
        yield _failed("tokenizer", error, "restore that file")
    else:
        yield _tokenizer(folder, tokenizer)
        yield _chat(folder, tokenizer)
    yield _guarded("sampling", lambda: _sampling(folder), "correct that file, or remove it")
    yield from _drafter(options, config)
    if is_there:
        yield from _memory(options)


def _failed(name: str, error: K26Error, fix: str) -> Check:
    """Returns an error of the package as a check; what follows its last semicolon is the fix.

    Args:
        fix: of an error that says none.
    """
    text, _, last = str(error).rpartition("; ")
    return Check(name, FAIL, text or last, last if text else fix, error.exit_code)


def _guarded(name: str, check: Callable[[], Check], fix: str) -> Check:
    try:
        return check()
    except K26Error as error:
        return _failed(name, error, fix)


def _versions() -> Check:
    parts = [
        f"k26jax {__version__}",
        f"Python {platform.python_version()}",
        f"jax {jax.__version__}",
    ]
    for name in _PACKAGES:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            fix = "pip install k26jax, which brings it"
            return Check("versions", FAIL, f"{name} is not installed", fix, 1)
    return Check("versions", OK, ", ".join(parts))


def _server() -> Check:
    try:
        require_packages()
    except K26Error as error:
        # Only `serve` and `batch` need it.
        return replace(_failed("server", error, _INSTALL), status=WARN, exit_code=0)
    return Check("server", OK, "its packages are installed")


def _port(host: str, port: int) -> Check:
    if importlib.util.find_spec("uvicorn") is None:
        return Check("port", WARN, "not tried without the server's packages", "see the line above")
    from k26jax.server.run import bind, url_of

    with bind(host, port) as sock:
        return Check("port", OK, f"{url_of(sock)} is free")


def _devices():
    """Yields what JAX sees; returns whether it sees anything."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        fix = "set JAX_PLATFORMS=cpu to run without an accelerator, or repair its driver"
        text = f"JAX finds no device: {str(error).splitlines()[0]}"
        yield Check("devices", FAIL, text, fix, 1)
        return False
    first = devices[0]
    free = available_bytes([first])
    text = f"{len(devices)} x {first.device_kind} ({first.platform})"
    text += f", {_size(free)} free" + (" on the first" if len(devices) > 1 else "") if free else ""
    if first.platform == "cpu" and (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        fix = "pip install 'k26jax[cuda13]' (Python 3.12 or newer), and leave JAX_PLATFORMS unset"
        yield Check("devices", WARN, f"{text}, but this machine has an NVIDIA driver", fix)
    else:
        yield Check("devices", OK, text)
    if first.platform != "cpu":
        yield _kernels()
        host = host_available_bytes()
        yield Check("host memory", OK, "not told" if host is None else f"{_size(host)} free")
    return True


def _kernels() -> Check:
    try:
        found = architecture()
    except KernelError as error:
        return replace(_failed("kernels", error, _INSTALL), status=WARN, exit_code=0)
    if found is None:
        oldest = ".".join(map(str, OLDEST_JAX))
        fix = f"the kernels are for NVIDIA GPUs and need JAX {oldest} or newer"
        return Check("kernels", WARN, "none for this device", fix)
    return Check("kernels", OK, f"for {found}")


def _compile_cache(options: dict[str, Any]) -> Check:
    directory = options.get("compile_cache_dir", "auto")
    if directory == OFF:
        fix = "leave --compile-cache-dir out"
        return Check("compile cache", WARN, "off, so each start compiles everything", fix)
    try:
        folder = try_folder(directory)
    except (OSError, RuntimeError) as error:
        fix = "give a --compile-cache-dir that can be written; until then each start compiles"
        return Check("compile cache", WARN, f"{folder_of(directory)} cannot be used ({error})", fix)
    sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    return Check("compile cache", OK, f"{folder}: {len(sizes)} files, {_size(sum(sizes))}")


def _files(name: str, folder: Path) -> Iterator[Check]:
    summary = summarize(folder)
    if summary.fault is not None:
        yield _failed(name, CheckpointError(summary.fault), _RESTORE)
        return
    facts = summary.facts
    text = f"{summary.files} files, {_size(summary.file_bytes)}, {facts['layers']} layers"
    if "model type" in facts:
        text += f", {facts['model type']}, context {facts['context']}"
    if summary.ignored_files:
        fix = "move them away, or restore the index that has them"
        names = ", ".join(summary.ignored_files[:3])
        yield Check(name, WARN, f"{text}; the index has not {names}", fix)
    else:
        yield Check(name, OK, text)


def _load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    if not any((folder / name).is_file() for name in ("tiktoken.model", "tokenizer.json")):
        return None
    return load_tokenizer(folder, config.vocab_size)


def _tokenizer(folder: Path, tokenizer: Tokenizer | None) -> Check:
    if tokenizer is None:
        fix = f"put the model's tiktoken.model or tokenizer.json into {folder}"
        return Check("tokenizer", WARN, "none, so prompts must be token ids", fix)
    ids = tokenizer.encode(_SAMPLE)
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if set(ids) & set(tokenizer.special_ids.values()):
        text = "text becomes control tokens"
        return Check(
            "tokenizer", FAIL, text, "restore the tokenizer's files", TokenizerError.exit_code
        )
    if back != _SAMPLE:
        # A vocabulary of few letters loses others by its making.
        fix = "restore the tokenizer's files, unless its vocabulary cannot hold every text"
        return Check("tokenizer", WARN, f"a text comes back as {back[:60]!r}", fix)
    if not tokenizer.eos_ids:
        fix = "name eos_token in tokenizer_config.json, or answers end by length alone"
        return Check("tokenizer", WARN, "it has no end token", fix)
    text = f"{tokenizer.vocab_size} ids, a text comes back the same from {len(ids)} of them"
    return Check("tokenizer", OK, text)


def _chat(folder: Path, tokenizer: Tokenizer | None) -> Check:
    try:
        form = chat_format(folder, tokenizer)
        prompt = form.prompt([{"role": "user", "content": "hello"}])
    except K26Error as error:
        found = replace(
            _failed("chat template", error, "restore the folder's chat template"),
            status=WARN,
            exit_code=0,
        )
        return replace(found, text=f"no chats: {found.text}")
    tools = "with tools" if form.calls_tools else "without tools"
    has = any(folder.glob("chat_template*")) or "chat_template" in _json(
        folder / "tokenizer_config.json"
    )
    origin = "the folder's" if has else "the built-in one"
    return Check(
        "chat template", OK, f"{origin}, {tools}; a greeting has {len(prompt.token_ids)} tokens"
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _sampling(folder: Path) -> Check:
    found = generation_defaults(folder)
    shown = ", ".join(f"{name} = {value}" for name, value in found.items())
    return Check("sampling", OK, shown or "the folder recommends nothing; temperature = 1")


def _drafter(options: dict[str, Any], target: ModelConfig) -> Iterator[Check]:
    config = EngineConfig(**options)
    if config.algorithm is Algorithm.NONE:
        text = "none, so each step gives one token; --speculative-draft-model-path gives one"
        yield Check("drafter", OK, text)
        return
    draft_folder = Path(str(config.speculative_draft_model_path))
    found = list(_files("drafter", draft_folder))
    try:
        draft = DraftConfig.from_folder(draft_folder)
        draft.check_target(target, str(draft_folder))
    except K26Error as error:
        found = [_failed("drafter", error, "give the drafter of this model")]
    yield from found


def _memory(options: dict[str, Any]) -> Iterator[Check]:
    """Yields whether weights and caches fit, and how an engine of these options would run."""
    # Other processes of a run are not asked; this one's part is the same without them.
    alone: dict[str, Any] = {"coordinator_address": None, "num_processes": None, "process_id": None}
    try:
        with warnings.catch_warnings(record=True):
            prepared = prepare(EngineConfig(**(options | alone)))
        weights = prepared.weight_bytes()
        prepared.require_memory(weights=weights)
    except K26Error as error:
        yield _failed("memory", error, "change that option")
        return
    yield _fit(prepared, weights)
    if prepared.plan.kernels != "pallas" and jax.default_backend() == "gpu":
        fix = "INT4 experts in bfloat16 run on the kernels: --dtype auto --kernels auto"
        yield Check("engine", WARN, "runs without the GPU kernels", fix)
    else:
        algorithm = prepared.config.algorithm.value
        yield Check("engine", OK, f"{algorithm}, {prepared.dtype.name}, {prepared.plan.kernels}")


def _fit(prepared: Prepared, weights: int) -> Check:
    cache = tree_bytes(prepared.state_shapes())
    devices = prepared.placement and prepared.placement.local_devices
    free = available_bytes(devices)
    slots, context = prepared.config.max_running_requests, prepared.context_length
    each = f" on each of {len(devices)} devices" if devices and len(devices) > 1 else ""
    text = f"weights {_size(weights)}, caches {_size(cache)}{each}"
    text += f" for {slots} x {context} tokens"
    if prepared.prefix_pages:
        text += f", prefix cache {_size(tree_bytes(prepared.page_shapes()))}"
    if free is None:
        fix = "compare with the device's memory yourself"
        return Check("memory", WARN, f"{text}; how much is free is not told", fix)
    text += f", of {_size(free)} free"
    if weights + cache > _TIGHT * free:
        fix = "lower --context-length or --max-running-requests: programs take some too"
        return Check("memory", WARN, text, fix)
    most = prepared.models.target.config.max_position_embeddings
    largest = min(int((_TIGHT * free - weights) / (cache / context)), most)
    return Check("memory", OK, f"{text}; a context of {largest} would fit")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
