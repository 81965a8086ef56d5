"""One module per command; each has `add(commands)` and `run(args) -> exit code`."""
