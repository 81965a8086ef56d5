"""`k26jax batch` from a checkout, before the package is installed."""

import sys

from k26jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
