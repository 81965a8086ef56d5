"""The type checker of the jaxtyping import hook: beartype, made to look into records of arrays.

A record is a NamedTuple or dataclass whose fields have jaxtyping annotations. Where a function
takes or returns one, its fields must fit them, and their axes must agree with all other arrays
there.
"""

import dataclasses
import functools
import types
import typing

import beartype
import jax
from beartype.vale import Is
from jaxtyping import AbstractArray


class ShapeError(TypeError):
    """A record holds an array that does not fit its annotation or another array of the call."""


def checked(function):
    """Returns the function with its arguments and result checked against its annotations."""
    if function.__name__ == "__init__":
        # JAX makes records of whatever its transformations need, not only of arrays.
        return function
    hints = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    function.__annotations__ = hints
    return beartype.beartype(function)


def _checkable(hint):
    if _is_array_hint(hint):
        # Shape and dtype; arrays of the host may stand for arrays of the device.
        return hint.dtype[typing.Any, hint.dim_str]
    if hint is jax.Array or hint is typing.Self:
        return typing.Any
    if _array_fields(hint):
        return typing.Annotated[hint, Is[functools.partial(_fields_fit, hint)]]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_checkable, inner))]  # noqa: UP007 - made at run time
    if origin in (tuple, list):
        return origin[tuple(map(_checkable, inner))]
    return hint


def _is_array_hint(hint):
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


@functools.cache
def _array_fields(hint):
    """Returns the jaxtyping annotations of a record class, by field; empty for anything else."""
    is_record = isinstance(hint, type) and (
        dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")
    )
    hints = typing.get_type_hints(hint) if is_record else {}
    return {name: _checkable(field) for name, field in hints.items() if _is_array_hint(field)}


def _fields_fit(cls, record):
    """Returns whether this is a record of the class; its axes count among those of the call.

    Raises: ShapeError that names the field, if one does not fit.
    """
    if not isinstance(record, cls):
        return False
    for name, hint in _array_fields(cls).items():
        array = getattr(record, name)
        lead, dots, rest = hint.dim_str.rpartition("...")
        if dots and getattr(array, "ndim", -1) == len(rest.split()) + 1:
            # One leading axis is a batch of sequences: it is the axis b of the other arrays.
            hint = hint.dtype[hint.array_type, f"{lead}b {rest}"]
        if not isinstance(array, hint):
            found = getattr(array, "aval", array)
            raise ShapeError(f"{cls.__name__}.{name} is {found}, expected {hint.__name__}")
    return True
