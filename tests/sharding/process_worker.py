"""One process of a run of several: builds the LLM, then leads or follows. Started by the tests.

Usage: process_worker.py OPTIONS ASKS, both JSON; process 0 prints a line when it is ready, and its
tokens as JSON at the end; with no asks it generates until it is ended.
"""

import json
import sys

from k26jax import LLM, SamplingParams
from k26jax.cli import run_command


class _Arguments:
    """A parser that has nothing to parse: errors are reported as the command line does."""

    prog = "worker"

    def __init__(self, run):
        self.run = run

    def parse_args(self, argv):
        return self


def main(args) -> int:
    options, asks = map(json.loads, sys.argv[1:3])
    with LLM(**options) as llm:
        print(f"ready {int(llm.leads)}", flush=True)
        if not llm.leads:
            llm.follow()
            print("followed", flush=True)
            return 0
        while not asks:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
            print("again", flush=True)
        prompts = [ask.pop("prompt") for ask in asks]
        params = [SamplingParams(**ask) for ask in asks]
        outputs = llm.generate(prompts, params, raise_on_error=True)
        tokens = [output.outputs[0].token_ids for output in outputs]
        logits = llm.logits(list(range(20)))[:, :4].tolist()
        cached = [output.cached_tokens for output in outputs]
        print(json.dumps({"tokens": tokens, "logits": logits, "cached": cached}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(_Arguments(main)))
