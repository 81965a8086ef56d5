#!/bin/sh
# Sets up .venv if it is not there and writes text with the trained pair, DDTree beside plain decoding.
set -eu
cd "$(dirname "$0")/.."
sh scripts/setup.sh
exec .venv/bin/k26jax generate --model-path checkpoints/k26-tiny \
  --speculative-draft-model-path checkpoints/k26-tiny-dflash \
  --temperature 0 --max-tokens 96 --show-trees --compare-plain "${1:-import os
import sys

def main():
}"
