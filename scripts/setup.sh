#!/bin/sh
# Makes .venv and installs k26jax in it, with the extra "$1" if given (dev). Installs again only
# once pyproject.toml has changed, so that a later start needs no network.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/installed${1:+-$1}
if [ ! -x .venv/bin/python ]; then
  python3 -m venv .venv
  rm -f .venv/installed*
fi
if [ ! -e "$stamp" ] || [ -n "$(find pyproject.toml -newer "$stamp")" ]; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${1:+[$1]}"
  # An extra brings the package itself too.
  touch .venv/installed "$stamp"
fi
