#!/bin/sh
# Sets up .venv if it is not there and runs the tests; arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
exec .venv/bin/python -m pytest "$@"
