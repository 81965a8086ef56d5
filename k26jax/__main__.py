"""`python -m k26jax`."""

from k26jax.cli import main

raise SystemExit(main())
