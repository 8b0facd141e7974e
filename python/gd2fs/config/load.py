"""Reading the configuration: flags over GD2FS_* environment over TOML over defaults, validated once."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gd2fs.config.tree import Settings

DEFAULT_FILE = "gd2fs.toml"


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the knob, where its value came from and what to
    write.
    """


@dataclass(frozen=True)
class Loaded:
    """Validated settings and, for each "section.name", where its value came from."""

    settings: Settings
    origins: dict[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str, FieldInfo]]:
        """(name, value with secrets masked, origin, field) of every knob, in the order of the tree."""
        for name, field in knobs():
            section, key = name.split(".")
            value = getattr(getattr(self.settings, section), key)
            if extra(field, "secret") and value:
                value = "********"
            yield name, value, self.origins[name], field

    def digest(self) -> str:
        """Hash of every knob that is not secret; a node's heartbeat carries it so that drift can be seen."""
        plain = {name: value for name, value, _, field in self.rows() if not extra(field, "secret")}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    def token(self) -> str:
        """The token this process presents, from the knob or the file. Raises ConfigError if the file cannot
        be read.
        """
        cluster = self.settings.cluster
        if cluster.token or not cluster.token_file:
            return cluster.token
        try:
            return Path(cluster.token_file).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"cluster.token_file: cannot read {cluster.token_file}: {error.strerror}"
            ) from error


def sections() -> dict[str, type[BaseModel]]:
    """Section name -> its model, in order."""
    return {
        name: field.annotation
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def knobs() -> Iterator[tuple[str, FieldInfo]]:
    """("section.name", field) of every knob, in order."""
    for section, model in sections().items():
        for key, field in model.model_fields.items():
            yield f"{section}.{key}", field


def extra(field: FieldInfo, key: str) -> Any:
    """A mark of a knob: "hot", "secret" or "env"."""
    return field.json_schema_extra.get(key) if isinstance(field.json_schema_extra, dict) else None


def environment_names(name: str, field: FieldInfo) -> list[str]:
    """Environment names of a knob, the first that is set wins."""
    general = "GD2FS_" + name.replace(".", "_").upper()
    special = extra(field, "env")
    return [special, general] if special and special != general else [general]


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> Loaded:
    """Reads and validates the configuration.

    flags: "section.name" -> value; None values are flags that were not given. environ: default os.environ.
    file: default $GD2FS_CONFIG, else ./gd2fs.toml if it exists. Raises ConfigError naming every bad knob.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, tuple[Any, str]] = {}
    values.update(_from_file(file or environ.get("GD2FS_CONFIG"), environ))
    values.update(_from_environment(environ))
    known = dict(knobs())
    for name, value in (flags or {}).items():
        if name not in known:
            raise ConfigError(f"{name} is not a knob of the configuration")
        if value is not None:
            values[name] = (value, "flag")
    tree: dict[str, dict[str, Any]] = {}
    for name, (value, _) in values.items():
        section, key = name.split(".")
        tree.setdefault(section, {})[key] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, values)) from None
    return Loaded(settings, {name: values[name][1] if name in values else "default" for name in known})


def _from_file(path: str | Path | None, environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    if path is None:
        if not Path(DEFAULT_FILE).is_file():
            return {}
        path = DEFAULT_FILE
    try:
        with open(path, "rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error
    models = sections()
    values: dict[str, tuple[Any, str]] = {}
    unknown: list[str] = []
    for section, table in document.items():
        if section not in models or not isinstance(table, dict):
            unknown.append(section)
            continue
        for key, value in table.items():
            if key in models[section].model_fields:
                values[f"{section}.{key}"] = (value, f"file {path}")
            else:
                unknown.append(f"{section}.{key}")
    if unknown:
        raise ConfigError(
            f"{path}: unknown {', '.join(sorted(unknown))}; sections are {', '.join(models)}, "
            "and `gd2fs config show` lists their knobs"
        )
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    values: dict[str, tuple[Any, str]] = {}
    known: set[str] = set()
    for name, field in knobs():
        names = environment_names(name, field)
        known.update(names)
        found = next((key for key in names if environ.get(key, "") != ""), None)
        if found:
            values[name] = (environ[found], f"environment {found}")
    # Names of a section are ours alone; other GD2FS_ names belong to clients that read them by themselves.
    prefixes = tuple(f"GD2FS_{section.upper()}_" for section in sections())
    unknown = sorted(key for key in environ if key.startswith(prefixes) and key not in known)
    if unknown:
        raise ConfigError(
            f"unknown environment {', '.join(unknown)}; `gd2fs config show` lists the names that exist"
        )
    return values


def _explain(error: ValidationError, values: Mapping[str, tuple[Any, str]]) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"][:2])
        origin = f" (from {values[name][1]})" if name in values else ""
        lines.append(f"{name}{origin}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)
