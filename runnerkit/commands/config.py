"""YAML configs of runs: components by import path, with arguments that are checked before anything is created.

OmegaConf resolves references such as ``${hparams.lr}``, Hydra creates components such as ``_target_: torch.nn.Linear``,
and pydantic checks values against the types in the components' signatures.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from runnerkit.errors import did_you_mean, nearest_name
from runnerkit.monitor import Monitor
from runnerkit.support.deprecation import NOTHING, old_names, renamed_arguments, replace_old_names, warn_of_argument

_TARGET = "_target_"
_OWN_KEYS = {_TARGET, "_args_", "_partial_", "_convert_", "_recursive_"}  # accepted by Hydra for every component


class TrainingError(Exception):
    """An error during training; ``__cause__`` is the exception that was raised."""


@dataclass(frozen=True)
class Config:
    """A config file with its references resolved.

    Attributes:
        path: the file, used in error messages.
        values: plain dicts, lists, strings and numbers.
        written: the same, to be written to files; ``${oc.env:NAME}`` stays unresolved to keep secrets out of them.
    """

    path: Path
    values: dict[str, Any]
    written: dict[str, Any]

    def refused(self, key: str, why: str) -> ValueError:
        """Return an error that names the file and the key, such as "loaders.train.batch_size", and the reason."""
        return ValueError(f"{self.path}: {key}: {why}")

    def make(self, key: str, *arguments: Any) -> Any:
        """Create the component at `key` and all nested ones; a dict or list of components; None if the key is not set.

        Args:
            arguments: positional arguments that the config does not have, such as an optimizer's parameters.
        Raises:
            ValueError: a component is unknown, does not accept an argument, or raises.
        """
        node = at(self.values, key)
        if node is None:
            return None
        if isinstance(node, list):  # one by one: an error names its place
            return [self.make(f"{key}.{index}", *arguments) for index in range(len(node))]
        checked = self._checked(node, key, is_made=True)
        utils, errors = _package("hydra.utils"), _package("hydra.errors")
        try:
            return utils.instantiate(checked, *arguments, _convert_="all")
        except errors.InstantiationException as error:
            place = self._place(key, str(error).partition("full_key: ")[2])
            raise self.refused(place, self._failure(error.__cause__ or error, at(self.values, place))) from error

    def check(self, key: str) -> None:
        """Check the component at `key` and all nested ones against their signatures, without creating them.

        Raises:
            ValueError: a component is unknown, does not accept an argument, or expects another type.
        """
        self._checked(at(self.values, key), key)

    def check_call(self, values: dict[str, Any], key: str, target: Callable[..., Any]) -> dict[str, Any]:
        """Check named values against the signature of `target`; return them, plain ones converted to its types."""
        parameters = _parameters(target)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        names = _names(parameters)
        hints = {name: hint for name, hint in _hints(target).items() if name not in old_names(target)}
        for name in values:
            if name not in {*names, *old_names(target), *_OWN_KEYS} and parameters and not takes_any:
                path = f"{target.__module__}.{target.__qualname__}"
                found = f"{path} does not accept {name!r}; it accepts {', '.join(names)}"
                raise self.refused(key, found + did_you_mean(name, names))
        return {
            name: self.converted(value, hints[name], f"{key}.{name}".removeprefix("."))
            if name in hints and _is_plain(value)
            else value
            for name, value in values.items()
        }

    def _checked(self, node: Any, key: str, *, is_made: bool = False) -> Any:
        """Return the node with values of the types that its components expect; also with today's names to make it."""
        if isinstance(node, list):
            return [self._checked(each, f"{key}.{index}", is_made=is_made) for index, each in enumerate(node)]
        if not isinstance(node, dict):
            return node
        values = {name: self._checked(each, f"{key}.{name}", is_made=is_made) for name, each in node.items()}
        if _TARGET not in node:
            return values
        target = self._imported(node[_TARGET], key)
        values = self.check_call(values, key, target)
        if is_made:
            self.rename(values, key, target)
        of_monitor = {_TARGET: f"{Monitor.__module__}.{Monitor.__name__}"}  # Hydra creates it again
        return {name: of_monitor | asdict(each) if isinstance(each, Monitor) else each for name, each in values.items()}

    def rename(self, values: dict[str, Any], key: str, target: Callable[..., Any]) -> None:
        """Give arguments of `target` the names that they have today, with a warning that says what to write.

        Raises:
            ValueError: one of them is invalid, or given under both names.
        """
        renamed, place = renamed_arguments(target), f"{self.path}: {key}".removesuffix(": ")
        if not renamed:
            return
        try:
            old, new = replace_old_names(renamed, target.__name__, values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from error
        if old:
            warn_of_argument(f"{place}: {_in_yaml(old)}", instead=_in_yaml(new) or NOTHING)

    def _imported(self, path: Any, key: str) -> Callable[..., Any]:
        log = logging.getLogger("hydra.utils")
        was_disabled, log.disabled = log.disabled, True  # it would log the error that is raised here
        try:
            found = _package("hydra.utils").get_object(path)
        except Exception as error:  # importing a module can raise anything
            why = " ".join(str(error).split()) + (_beside(self.path, path) or _nearest_target(path))
            raise self.refused(f"{key}.{_TARGET}", f"cannot import {path!r}: {why}") from error
        finally:
            log.disabled = was_disabled
        if not callable(found):
            raise self.refused(
                f"{key}.{_TARGET}", f"{path!r} is a {type(found).__name__}; expected a class or function"
            )
        return found  # type: ignore[no-any-return]  # it is callable

    def converted(self, value: Any, hint: Any, key: str) -> Any:
        """Convert a plain value to the type of `hint`: "3" to 3, a string to a Path."""
        pydantic = _package("pydantic")
        try:
            adapter = pydantic.TypeAdapter(hint, config={"arbitrary_types_allowed": True})
        except pydantic.PydanticUserError:
            return value  # a type that pydantic cannot check
        try:
            converted = adapter.validate_python(value)
        except pydantic.ValidationError:
            expected = inspect.formatannotation(hint)
            raise self.refused(key, f"expected {expected}, got {value!r}") from None
        return value if isinstance(value, list | dict) else converted  # pydantic wraps an Iterable in a lazy iterator

    def _place(self, key: str, within: str) -> str:
        """Convert Hydra's path of a node, such as "layers[0].layers1" for item 1 of item 0, to a dotted key."""
        place = ".".join([key, *re.sub(r"\[(\d+)\]", r".\1", within).removeprefix(".").split(".")]).removesuffix(".")
        return place if at(self.values, place) is not None else re.sub(r"(\d+)$", r".\1", place)

    def _failure(self, error: BaseException, node: Any) -> str:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        target = node[_TARGET] if isinstance(node, dict) and _TARGET in node else ""
        takes = ""
        if isinstance(error, TypeError) and target:  # usually a missing argument
            takes = f"; it accepts {', '.join(_names(_parameters(_package('hydra.utils').get_object(target))))}"
        why = " ".join(str(error).split())
        return f"{target}: {type(error).__name__}: {why} ({Path(frame.filename).name}:{frame.lineno}){takes}"


def read_config(path: Path, overrides: Iterable[str] = (), given: Mapping[str, Any] | None = None) -> Config:
    """Read a config file and override some of its values.

    Args:
        path: the file, or its URL in a store.
        overrides: of the form "optimizer.lr=0.01".
        given: {key: value} of top-level keys; None keeps the value of the file.
    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a YAML mapping, a reference cannot be resolved, or an override is invalid.
        ImportError: a required package is not installed.
    """
    from runnerkit.storage.remote.copies import local_copy, name_of  # late: other commands read no config

    omegaconf, yaml = _package("omegaconf"), importlib.import_module("yaml")
    file, path = local_copy(path), name_of(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path}: " + ("a folder: pass a file in it" if file.is_dir() else "no such file"))
    try:
        config = omegaconf.OmegaConf.create(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not omegaconf.OmegaConf.is_dict(config):
        raise ValueError(f"{path} contains a list; expected a mapping with keys such as model: and loaders:")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not key or not equals:
            raise ValueError(f"override {override!r} must have the form key=value, such as optimizer.lr=0.01")
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
    """Copy a config so that ``${oc.env:NAME}`` resolves to this text itself, also through references."""
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


def _in_yaml(values: Mapping[str, Any]) -> str:
    """Return values as a config has them.

    >>> _in_yaml({"monitor": "valid/loss", "save_last": True})
    'monitor: valid/loss, save_last: true'
    """
    text = importlib.import_module("yaml").safe_dump(values, default_flow_style=True, sort_keys=False, width=math.inf)
    return str(text).strip().removeprefix("{").removesuffix("}")


def at(values: Any, key: str) -> Any:
    """Look up a path such as "callbacks.0.patience"; None if it does not exist.

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
    except ValueError:  # implemented in C
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
        with suppress(Exception):  # names that are imported for type checkers only
            hints |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), function.__globals__)
    return hints


def _beside(config: Path, path: Any) -> str:
    """Return the end of a message for an import path whose module lies in the folder of a config, not in this one."""
    module = config.parent / f"{str(path).partition('.')[0]}.py"
    is_elsewhere = module.is_file() and config.parent.resolve() != Path.cwd()
    return f"; {module.name} is beside the config: start the command in {config.parent}" if is_elsewhere else ""


def _nearest_target(path: Any) -> str:
    """Return the end of a message that suggests another name in the module of an import path, if one is similar."""
    module, _, name = str(path).rpartition(".")
    try:
        known = dir(importlib.import_module(module))
    except Exception:  # importing a module can raise anything
        return ""
    nearest = nearest_name(name, known)
    return "" if nearest in (None, name) else f"; did you mean {module}.{nearest}?"


def yaml_of(values: dict[str, Any]) -> str:
    """Return values as YAML, with quotes around texts that configs would read as numbers, such as "1e-3"."""
    return str(_package("omegaconf").OmegaConf.to_yaml(values))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError("configs need hydra-core and pydantic: pip install 'runnerkit[config]'") from None
