"""The OpenAI-compatible server: HTTP on top of the scheduler. Needs the extra `server`."""
