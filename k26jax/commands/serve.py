"""`k26jax serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.commands.options import add_engine_options, served_options
from k26jax.commands.terminal import Startup, say
from k26jax.config import EngineConfig
from k26jax.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from k26jax.engine.loading import Prepared
    from k26jax.llm import LLM
    from k26jax.server.service import Service

HOST, PORT = "127.0.0.1", 30000
_NEEDED = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")
_GENERATION = ("temperature", "top_p", "top_k", "min_p")
_RUNNING = 4
# Flag, choices, default, help.
_CHOICES = (
    (
        "--grammar-backend",
        ["auto", "llguidance", "none"],
        "auto",
        "what holds answers to JSON schemas and forced calls of tools; its two programs are "
        "compiled at the start. auto: llguidance if it is installed. none: such requests are "
        "refused",
    ),
    ("--log-format", ["text", "json"], "text", "how events are written to standard error"),
    ("--log-level", ["debug", "info", "warning"], "info", "lowest level that is written"),
)


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve one model over HTTP, as OpenAI clients expect it",
        description="Serves one model over HTTP: chat and text completions with streaming, tools "
        "and thoughts, as OpenAI clients expect them. SIGTERM or Ctrl-C lets running requests "
        "end; a second one ends them.",
    )
    parser.add_argument("model", nargs="?", help="model folder, the same as --model-path")
    group = parser.add_argument_group("server")
    for flags, kind, default, metavar, text in (
        (("--host",), str, HOST, "HOST", "address to listen on"),
        (("--port",), int, PORT, "PORT", "port to listen on; 0: any that is free"),
        (("--max-waiting",), int, 256, "N", "sequences that may wait; more are answered with 429"),
        (("--max-sequences",), int, 16, "N", "sequences of one request: prompts times n"),
        (("--max-body-mb",), int, 32, "MB", "largest body of a request"),
        (("--stream-steps",), int, 1, "N", "decoding steps between two looks while streaming"),
        (("--grace-seconds",), float, 30.0, "S", "time for running requests after SIGTERM"),
        (("--stall-seconds",), float, 300.0, "S", "a longer call of the device is unhealthy"),
    ):
        group.add_argument(
            *flags, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--served-model-name",
        "--alias",
        action="append",
        metavar="NAME",
        help="name in requests and answers; may be repeated (default: the folder's name)",
    )
    _add_keys(group)
    group.add_argument(
        "--draft-trees",
        action="store_true",
        help="let requests, and the page at /, see each step's draft tree (one more program)",
    )
    group.add_argument(
        "--unknown-fields",
        choices=["refuse", "warn"],
        default="refuse",
        help="what is done with fields of a request that nobody knows (default: refuse)",
    )
    for flag, choices, default, text in _CHOICES:
        group.add_argument(
            flag, choices=choices, default=default, help=f"{text} (default: {default})"
        )
    _add_engine_options(parser)
    parser.set_defaults(run=run)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser, max_running_requests=_RUNNING, enable_prefix_caching=True)
    parser.add_argument(
        "--disable-radix-cache",
        dest="enable_prefix_caching",
        action="store_false",
        default=None,
        help="the same as --no-enable-prefix-caching",
    )


def _add_keys(group: Any) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that clients must send; may be repeated (default: none, all are let in)",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with one API key a line"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 after a signal, 1 if the engine failed."""
    require_packages()
    require_backend(args.grammar_backend)
    config = EngineConfig(**served_options(args))
    keys = _api_keys(args)
    if not 0 <= args.port < 1 << 16:
        raise RequestError(f"--port {args.port}, expected 0 to 65535")
    if not args.grace_seconds >= 0:  # NaN is not
        raise RequestError(f"--grace-seconds {args.grace_seconds}, expected 0 or more")
    from k26jax.engine.loading import prepare
    from k26jax.llm import LLM
    from k26jax.server import logs
    from k26jax.server.run import bind, serve, url_of
    from k26jax.server.service import Service
    from k26jax.server.settings import ServerSettings

    folder = Path(config.model_path)
    settings = ServerSettings(
        served_names=tuple(args.served_model_name or [folder.resolve().name]),
        api_keys=keys,
        max_waiting=args.max_waiting,
        max_sequences=args.max_sequences,
        max_body_bytes=args.max_body_mb << 20,
        stream_steps=args.stream_steps,
        stall_seconds=args.stall_seconds,
        draft_trees=args.draft_trees,
        refuses_unknown=args.unknown_fields == "refuse",
        shapes_answers=args.grammar_backend != "none",
        defaults=generation_defaults(folder),
    )
    logs.set_up(args.log_format, args.log_level)
    prepared = prepare(config)
    with Startup() as startup:
        if not prepared.leads:
            with LLM.from_prepared(
                prepared, on_load=startup.on_load, on_compile=startup.on_compile
            ) as llm:
                startup.ready("this process follows process 0")
                llm.follow()
            return 0
        sock = bind(args.host, args.port)
        _show(config, settings.shown())
        _show_prefix_cache(prepared)
        service, url = Service(settings), url_of(sock)
        load = _loader(prepared, startup, service, url)
        return serve(service, sock, load, grace=args.grace_seconds)


def _loader(prepared: Prepared, startup: Startup, service: Service, url: str) -> Callable[[], LLM]:
    """Returns what loads the model, showing its stages on the terminal and in the service."""
    from k26jax.llm import LLM

    def on_load(what: str, done: int, total: int) -> None:
        service.stage, service.percent = f"load {what}", 100 * done / max(total, 1)
        startup.on_load(what, done, total)

    def on_compile(name: str) -> None:
        service.stage, service.percent = f"compile {name}", 0.0
        startup.on_compile(name)

    def load() -> LLM:
        llm = LLM.from_prepared(prepared, on_load=on_load, on_compile=on_compile)
        # Compiled later they would make every running answer wait.
        llm.engine.runner.warm_up_extras(on_compile)
        is_there = importlib.util.find_spec("llguidance") is not None
        if service.settings.shapes_answers and is_there and prepared.tokenizer is not None:
            llm.engine.runner.warm_up_guided(on_compile)
        if service.settings.draft_trees:
            on_compile("traced_steps")
            llm.engine.runner.warm_up_traces()
            llm.engine.runner.warm_up_traces(has_extras=True)
        startup.ready(f"{service.name} on {url}")
        say(
            f"open {url} in a browser, or try:\n  curl {url}/v1/completions "
            "-H 'content-type: application/json' "
            '-d \'{"prompt": "import os", "max_tokens": 32}\''
        )
        return llm

    return load


def require_packages(what: str = "the server") -> None:
    """Raises ConfigError unless what a server is made of is installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {', '.join(missing)}; install with: pip install 'k26jax[server]'"
        )


def require_backend(name: str) -> None:
    """Raises ConfigError if a grammar backend that was asked for by name is not installed."""
    if name not in ("auto", "none") and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"--grammar-backend {name} is not installed; install with: pip install 'k26jax[server]'"
        )


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeError) as error:
            raise RequestError(f"--api-key-file {args.api_key_file}: {error}") from error
        if not lines:
            raise RequestError(f"--api-key-file {args.api_key_file} holds no key")
        keys += lines
    return tuple(keys)


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Returns the sampling parameters that a folder's generation_config.json recommends.

    Raises: ConfigError if it cannot be read, RequestError for values that cannot be.
    """
    from k26jax.engine.request import SamplingParams

    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object")
    found: dict[str, Any] = {name: data[name] for name in _GENERATION if data.get(name) is not None}
    if data.get("do_sample") is False:
        found = {"temperature": 0.0}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from error
    return found


def _show_prefix_cache(prepared: Prepared) -> None:
    """Prints what the prefix cache holds, which the memory there is may decide."""
    pages, size = prepared.prefix_pages, prepared.page_tokens
    if pages:
        say(f"prefix cache: {pages * size} tokens in pages of {size}")
    elif prepared.config.enable_prefix_caching:
        say(
            "prefix cache: none, as weights and slots leave no memory for it; lower "
            "--max-running-requests or --context-length to have one"
        )


def _show(config: EngineConfig, settings: dict[str, Any]) -> None:
    """Prints the effective configuration; options at their defaults are left out."""
    given = {
        item.name: value
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != item.default
    }
    say("engine: " + ", ".join(f"{name} = {value}" for name, value in given.items()))
    say("server: " + ", ".join(f"{name} = {value}" for name, value in settings.items()))
