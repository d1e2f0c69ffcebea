"""The type of settings that scripts make: a wrong call is answered by a sentence."""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.errors import ConfigError, meant

EXAMPLES = {"steps": 16, "staleness": 2}  # of what modes need


class Settings(type(msgspec.Struct)):  # type: ignore[misc]
    """The type of modes and optimizers. A call with unknown settings, or without a needed one, raises ConfigError."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        fields = cls.__struct_fields__
        if unknown := [name for name in settings if name not in fields]:
            hint = meant(unknown[0], fields) or (f": there are {', '.join(fields)}" if fields else "")
            raise ConfigError(f"rp.{cls.__name__} has no setting {unknown[0]!r}{hint}")
        needed = fields[len(values) : len(fields) - len(cls.__struct_defaults__)]
        if missing := [name for name in needed if name not in settings]:
            raise ConfigError(f"rp.{cls.__name__} needs {missing[0]}: write {written(cls)}")
        return super().__call__(*values, **settings)


def written(kind: type[msgspec.Struct]) -> str:
    """How a script writes an object of this class, with what it needs: ``rp.LocalSteps(steps=16)``."""
    needed = kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
    return f"rp.{kind.__name__}({', '.join(f'{name}={EXAMPLES[name]}' for name in needed if name in EXAMPLES)})"
