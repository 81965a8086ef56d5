#!/bin/sh
# Sets up .venv if it is not there and runs the tests; arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
sh scripts/setup.sh dev
exec .venv/bin/python -m pytest -n auto --dist loadscope "$@"
