"""Times decoding steps of a random model on a mesh, after checking its tokens on a small one.

No checkpoint is needed: every device makes its own part of the weights. Results are printed, and
written with --json, as soon as they are there. NVLink multicast is left as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from k26jax.bench.mesh import CONFIGS, all_reduces, check, measure, models
from k26jax.cli import Parser, run_command


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, default=CONFIGS[0])
    parser.add_argument("--layers", type=int, default=61, help="of the target (default: 61)")
    parser.add_argument("--draft-layers", type=int, default=6, help="(default: 6)")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--ep-size", type=int, default=1)
    parser.add_argument(
        "--width", default="1,8,16,32", help="rows of a step, 1: plain (default: %(default)s)"
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--kernels", choices=("reference", "pallas"), default="pallas")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--dispatches", type=int, default=10, help="timed, of 8 steps each")
    parser.add_argument(
        "--check-layers",
        type=int,
        default=0,
        metavar="N",
        help="also compare tokens of --config with N layers, which must fit on one device",
    )
    parser.add_argument("--skip-check", action="store_true", help="time only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here too")
    parser.set_defaults(run=run)
    return run_command(parser, argv)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if float32 tokens or the ranks' states differ."""
    import jax

    widths = [int(width) for width in args.width.split(",")]
    results: dict[str, Any] = {
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "options": {k: str(v) for k, v in vars(args).items() if k != "run"},
        "checks": [],
        "rows": [],
        "all_reduces": [],
    }
    print(f"{results['devices']}, jax {jax.__version__}", flush=True)
    good = args.skip_check or _check(args, results)
    model, draft = models(args.config, args.layers, args.draft_layers)
    print(f"{args.config}, {args.layers} layers, tp {args.tp_size}, ep {args.ep_size}", flush=True)
    for row in measure(
        model,
        draft,
        widths,
        tp_size=args.tp_size,
        ep_size=args.ep_size,
        context=args.context,
        kernels=args.kernels,
        dtype=args.dtype,
        dispatches=args.dispatches,
    ):
        record = row.record()
        results["rows"].append(record)
        _save(args, results)
        speeds = record["tokens_a_second_at_accept_length"]
        shown = ", ".join(f"{n}: {speed:.1f}" for n, speed in speeds.items())  # pyright: ignore
        print(
            f"width {row.width:3}: {row.step_seconds * 1e3:8.3f} ms a step, {row.all_reduces} "
            f"all-reduces of {row.all_reduce_seconds * 1e6:.1f} us "
            f"({record['all_reduce_share']:.0%} of it), tokens/s at accept length {shown}",
            flush=True,
        )
    for form, n_bytes, seconds in all_reduces(
        args.tp_size, args.ep_size, model.hidden_size, sorted({*widths, 64})
    ):
        results["all_reduces"].append({"form": form, "bytes": n_bytes, "seconds": seconds})
        _save(args, results)
        print(f"all-reduce of {n_bytes} bytes, {form}: {seconds * 1e6:.1f} us", flush=True)
    return 0 if good else 1


def _check(args: argparse.Namespace, results: dict[str, Any]) -> bool:
    good = True
    kinds = [("reference", "float32")]
    if (args.kernels, args.dtype) not in kinds:
        kinds.append((args.kernels, args.dtype))
    cases = [("small", 3, *kind, width) for kind in kinds for width in (1, 8)]
    if args.check_layers:
        cases += [(args.config, args.check_layers, *kind, 8) for kind in kinds]
    for name, layers, kernels, dtype, width in cases:
        found = check(name, layers, args.tp_size, args.ep_size, kernels, dtype, width)
        results["checks"].append(dataclasses.asdict(found))
        _save(args, results)
        # In bfloat16 another order of sums may move near-ties; in float32 it must not.
        good &= found.agree and (dtype != "float32" or found.equal == found.tokens)
        print(
            f"{name}, {layers} layers, {kernels}, {dtype}, width {width}: {found.equal} of "
            f"{found.tokens} greedy tokens are one device's; "
            f"ranks agree: {'yes' if found.agree else 'NO'}",
            flush=True,
        )
    return good


def _save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
