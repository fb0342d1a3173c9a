"""Reports as JSON files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from moe_cpu.errors import ArgumentError

R = TypeVar("R", bound="SavedReport")


@dataclasses.dataclass
class SavedReport:
    """What a JSON file can keep; derived numbers are left out of it and computed anew.

    Attributes:
        kind: tells its files from those of other reports; None for files that have no such entry.
        schema: raised when the meaning of a field changes.
        caption: what a picture says of the environment.
    """

    kind: ClassVar[str | None] = None
    schema: ClassVar[int] = 1
    caption: ClassVar[tuple[str, ...]] = ("cpu", "threads", "moe_cpu", "commit", "torch")

    @classmethod
    def parts(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields from their JSON form, in which objects are dictionaries."""
        return data

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**self._head(), **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls: type[R], data: dict[str, Any]) -> R:
        """Reads what `to_dict` made.

        Raises:
            ArgumentError: another kind or schema, or an environment that lacks what a caption says.
        """
        found: dict[str, Any] = {key: data[key] for key in ("kind", "schema") if key in data}
        if found != cls._head():
            raise ArgumentError(f"results: expected {_words(cls._head())}, got {_words(found)}")
        environment = data.get("environment")
        missing = [
            name for name in cls.caption if not isinstance(environment, dict) or name not in environment
        ]
        if missing:
            raise ArgumentError(
                f"results: expected an environment with {', '.join(missing)}, got {environment!r:.80}"
            )
        return cls(**cls.parts({key: value for key, value in data.items() if key not in found}))

    def save(self, path: str | Path) -> None:
        """Writes the JSON file, and the folders above it if they are missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Reads a JSON file that `save` wrote.

        Raises:
            ArgumentError: it is not one.
        """
        try:
            return cls.from_dict(read_json(path))
        except ArgumentError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"results: {path} cannot be read: {error}") from error

    @classmethod
    def _head(cls) -> dict[str, Any]:
        return {"schema": cls.schema} if cls.kind is None else {"kind": cls.kind, "schema": cls.schema}


def _words(head: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in head.items()) or "neither kind nor schema"


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a results file.

    Raises:
        ArgumentError: there is no such file, or no such object in it.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"results: {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ArgumentError(f"results: {path} cannot be read: expected a JSON object")
    return data
