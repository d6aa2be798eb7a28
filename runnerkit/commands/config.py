"""Runs written down in YAML: components by import path, arguments checked before anything is made.

References such as ``${hparams.lr}`` are OmegaConf's, components such as ``_target_: torch.nn.Linear`` Hydra's, and
pydantic holds values against the types that components ask for.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

_TARGET = "_target_"
_OWN_KEYS = {_TARGET, "_args_", "_partial_", "_convert_", "_recursive_"}  # Hydra's, of every component


class TrainingError(Exception):
    """Training raised, for a reason that is its cause."""


@dataclass(frozen=True)
class Config:
    """A config file, its references resolved.

    Attributes:
        path: the file, for messages.
        values: plain dicts, lists, strings and numbers.
        written: the same for files, which outlive the environment and its secrets: ``${oc.env:NAME}`` is not resolved.
    """

    path: Path
    values: dict[str, Any]
    written: dict[str, Any]

    def refused(self, key: str, why: str) -> ValueError:
        """Say why the value at `key`, such as "loaders.train.batch_size", will not do."""
        return ValueError(f"{self.path}: {key}: {why}")

    def make(self, key: str, *arguments: Any) -> Any:
        """Make the component at `key`, and what is nested in it; a dict or list of several; None if nothing is there.

        Args:
            arguments: positional ones, which the config does not have, such as an optimizer's parameters.
        Raises:
            ValueError: a component is unknown, takes no such argument, or raises.
        """
        node = at(self.values, key)
        if node is None:
            return None
        checked = self._checked(node, key)
        utils, errors = _package("hydra.utils"), _package("hydra.errors")
        try:
            return utils.instantiate(checked, *arguments, _convert_="all")
        except errors.InstantiationException as error:
            place = self._place(key, str(error).partition("full_key: ")[2])
            raise self.refused(place, self._failure(error.__cause__ or error, at(self.values, place))) from error

    def check(self, key: str) -> None:
        """Hold the component at `key`, and what is nested in it, against what they take, without making any.

        Raises:
            ValueError: one is unknown, takes no such argument, or one of another type.
        """
        self._checked(at(self.values, key), key)

    def check_call(self, values: dict[str, Any], key: str, target: Callable[..., Any]) -> dict[str, Any]:
        """Hold named values against what `target` takes; return them, plain ones converted to the types it asks for."""
        parameters = _parameters(target)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        names = _names(parameters)
        hints = _hints(target)
        for name in values:
            if name not in names and name not in _OWN_KEYS and parameters and not takes_any:
                raise self.refused(key, f"{_path_of(target)} takes no {name!r}; it takes {', '.join(names)}")
        return {
            name: self.converted(value, hints[name], f"{key}.{name}".removeprefix("."))
            if name in hints and _is_plain(value)
            else value
            for name, value in values.items()
        }

    def _checked(self, node: Any, key: str) -> Any:
        if isinstance(node, list):
            return [self._checked(each, f"{key}.{index}") for index, each in enumerate(node)]
        if not isinstance(node, dict):
            return node
        values = {name: self._checked(each, f"{key}.{name}") for name, each in node.items()}
        return self.check_call(values, key, self._imported(node[_TARGET], key)) if _TARGET in node else values

    def _imported(self, path: Any, key: str) -> Callable[..., Any]:
        log = logging.getLogger("hydra.utils")
        was_disabled, log.disabled = log.disabled, True  # it would tell over three lines what is raised here
        try:
            found = _package("hydra.utils").get_object(path)
        except Exception as error:  # whatever a module raises when it is imported
            why = " ".join(str(error).split())
            raise self.refused(f"{key}.{_TARGET}", f"cannot import {path!r}: {why}") from error
        finally:
            log.disabled = was_disabled
        if not callable(found):
            raise self.refused(
                f"{key}.{_TARGET}", f"{path!r} is a {type(found).__name__}; expected a class or function"
            )
        return found  # type: ignore[no-any-return]  # it is callable

    def converted(self, value: Any, hint: Any, key: str) -> Any:
        """Return a plain value as the type that `hint` asks for: "3" as 3, a string as a Path."""
        pydantic = _package("pydantic")
        try:
            adapter = pydantic.TypeAdapter(hint, config={"arbitrary_types_allowed": True})
        except pydantic.PydanticUserError:
            return value  # a type that says nothing of plain values
        try:
            converted = adapter.validate_python(value)
        except pydantic.ValidationError:
            expected = inspect.formatannotation(hint)
            raise self.refused(key, f"expected {expected}, got {value!r}") from None
        return value if isinstance(value, list | dict) else converted  # of an Iterable pydantic makes a lazy one

    def _place(self, key: str, within: str) -> str:
        """Turn what Hydra calls a place, such as "layers[0].layers1" for the second of the first, into our own."""
        place = ".".join([key, *re.sub(r"\[(\d+)\]", r".\1", within).removeprefix(".").split(".")]).removesuffix(".")
        return place if at(self.values, place) is not None else re.sub(r"(\d+)$", r".\1", place)

    def _failure(self, error: BaseException, node: Any) -> str:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        target = node[_TARGET] if isinstance(node, dict) and _TARGET in node else ""
        takes = ""
        if isinstance(error, TypeError) and target:  # most often for what is missing
            takes = f"; it takes {', '.join(_names(_parameters(_package('hydra.utils').get_object(target))))}"
        why = " ".join(str(error).split())
        return f"{target}: {type(error).__name__}: {why} ({Path(frame.filename).name}:{frame.lineno}){takes}"


def read_config(path: Path, overrides: Iterable[str] = (), given: Mapping[str, Any] | None = None) -> Config:
    """Read a file, and put other values in place of its own.

    Args:
        overrides: of the form "optimizer.lr=0.01".
        given: {key: value} at the top; None leaves the file's.
    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is no YAML of keys and values, a reference leads nowhere, an override is none.
        ImportError: the packages for it are missing.
    """
    omegaconf, yaml = _package("omegaconf"), importlib.import_module("yaml")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        config = omegaconf.OmegaConf.create(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not omegaconf.OmegaConf.is_dict(config):
        raise ValueError(f"{path} holds a list; expected keys and values, such as model: and loaders:")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise ValueError(f"{override!r} is no override; expected key=value, such as optimizer.lr=0.01")
        try:
            value = omegaconf.OmegaConf.from_dotlist([f"value={text}"])
            value = omegaconf.OmegaConf.to_container(value, resolve=False)["value"]
            omegaconf.OmegaConf.update(config, key, value, merge=False)
        except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, IndexError, ValueError) as error:
            raise ValueError(f"{path}: override {override!r}: {' '.join(str(error).split())}") from error
    config.update({key: value for key, value in (given or {}).items() if value is not None})
    try:
        written = omegaconf.OmegaConf.to_container(_without_environment(config), resolve=True)
        return Config(path, omegaconf.OmegaConf.to_container(config, resolve=True), written)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _without_environment(config: Any) -> Any:
    """Copy an OmegaConf so that ``${oc.env:NAME}`` resolves to this text, also where a reference leads to it."""
    omegaconf = _package("omegaconf")

    def env(name: str, *default: Any) -> str:
        return (
            f"${{oc.env:{','.join([name, *(repr(each) if isinstance(each, str) else str(each) for each in default)])}}}"
        )

    def decode(text: Any, *, _parent_: Any, _node_: Any) -> Any:
        if isinstance(text, str) and "${oc.env:" in text:
            return f"${{oc.decode:{text}}}"
        return _package("omegaconf.resolvers").oc.decode(text, _parent_, _node_)

    for name, resolver in {"env": env, "decode": decode}.items():
        omegaconf.OmegaConf.register_new_resolver(f"runnerkit.{name}", resolver, replace=True)
    return omegaconf.OmegaConf.create(_renamed(omegaconf.OmegaConf.to_container(config, resolve=False)))


def _renamed(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _renamed(each) for key, each in node.items()}
    if isinstance(node, list):
        return [_renamed(each) for each in node]
    return re.sub(r"\$\{oc\.(env|decode):", r"${runnerkit.\1:", node) if isinstance(node, str) else node


def at(values: Any, key: str) -> Any:
    """Look up a path such as "callbacks.0.topk"; None if nothing is there.

    >>> at({"a": [1, {"b": 2}]}, "a.1.b"), at({}, "a.b")
    (2, None)
    """
    for part in key.split("."):
        try:
            values = values[int(part) if isinstance(values, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _TARGET not in value and all(_is_plain(each) for each in value.values())
    return all(_is_plain(each) for each in value) if isinstance(value, list) else True


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(target).parameters
    except ValueError:  # written in C
        return {}
    return {name: each for name, each in found.items() if name != "self"}


def _names(parameters: dict[str, inspect.Parameter]) -> list[str]:
    names = [name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    several = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    return [*names, "_args_"] if several else names


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    hints = dict[str, Any]()
    for name, hint in inspect.get_annotations(function).items():
        with suppress(Exception):  # a name in it that is there for type checkers only
            hints |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), function.__globals__)
    return hints


def _path_of(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(
            "configs need the packages hydra-core and pydantic: pip install 'runnerkit[config]'"
        ) from None
