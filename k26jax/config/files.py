"""Reading JSON files and typed fields out of them, with errors that name file and field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar, cast

from k26jax.errors import ConfigError

# Names of the types in which published weights are computed.
DTYPES = ("bfloat16", "float16", "float32")
T = TypeVar("T")
_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises: ConfigError if the file is missing, unreadable or not one JSON object.
    """
    if not path.is_file():
        if path.parent.suffix == ".partial":
            raise ConfigError(
                f"{path.parent} is an unfinished conversion; finish it with `k26jax convert SOURCE "
                "TARGET --resume`"
            )
        raise ConfigError(f"{path} does not exist; expected a Hugging Face model folder there")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


class Fields:
    """Typed access to one JSON object; a wrong or missing field is named in the error."""

    def __init__(self, data: dict[str, Any], origin: str):
        self.data = data
        self.origin = origin

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        """Returns field `name` as `kind`; `None` in the file counts as absent.

        Raises: ConfigError if it is absent without a default, or of another type.
        """
        value = self.data.get(name)
        if value is None:
            if default is _MISSING:
                raise ConfigError(
                    f"{self.origin}: field {name!r} is missing; this engine takes no model value "
                    "from a default, so the file must state it"
                )
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        is_fit = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if not is_fit or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(
                f"{self.origin}: field {name!r} is {value!r}, expected {kind.__name__}"
            )
        return cast(T, value)

    def positive(self, name: str, default: Any = _MISSING) -> int:
        """Returns an integer field that must be at least 1; required without a default."""
        value = self.get(name, int, default)
        if value < 1:
            raise ConfigError(f"{self.origin}: field {name!r} is {value}, expected at least 1")
        return value

    def ints(self, name: str) -> tuple[int, ...]:
        """Returns a required field that is a list of integers."""
        value = self.get(name, list)
        if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise ConfigError(f"{self.origin}: field {name!r} is {value!r}, expected integers")
        return tuple(value)

    def refuse(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Raises ConfigError unless field `name` is absent or one of `allowed`."""
        value = self.data.get(name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{self.origin}: {name} = {value!r} is not supported: {why}")

    def refuse_other_dtypes(self) -> None:
        """Raises ConfigError unless `dtype` and its older name `torch_dtype` are absent or known.

        The files' tensors have dtypes of their own; an unknown name says that the model is not
        one of those this engine was made for.
        """
        for name in ("dtype", "torch_dtype"):
            self.refuse(name, DTYPES, f"expected one of {', '.join(DTYPES)}")
