"""Chooses experts for tokens, and lists the work of each expert."""

from k26jax.pallas.router.api import block_list, route, route_and_list
from k26jax.pallas.router.reference import Blocks

__all__ = ["Blocks", "block_list", "route", "route_and_list"]
