"""Training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn


class Modes:
    """The mode of each module and its children at one moment.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout())
    >>> model[1] = model[1].eval()
    >>> modes = Modes([model])
    >>> model = model.eval()
    >>> modes.restore()
    >>> [each.training for each in model.modules()]
    [True, True, False]
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # A compiled module has the mode of the one inside.
        children = {id(child): vars(child) for module in modules for child in module.modules()}
        self._modules = [each for each in children.values() if "training" in each]
        self._training = self._now()

    def _now(self) -> list[bool]:
        return [each["training"] for each in self._modules]

    def swap(self) -> None:
        """Give each module the mode that it had, and keep the one that it has for the next call."""
        now = self._now()
        self.restore()
        self._training = now

    def restore(self) -> None:
        """Give each module the mode that it had."""
        for module, training in zip(self._modules, self._training, strict=True):
            module["training"] = training  # setattr() takes twenty times as long

    def keep(self) -> None:
        """Keep the mode that each module has now."""
        self._training = self._now()


class TrainingModes:
    """Modes of a model from one training pass to the next: what the user sets within training stays.

    A model begins in training mode, except parts that come frozen and in evaluation mode below a module that trains.
    Parts in evaluation mode below a module in that mode train: pretrained models come so.

    Args:
        model: as the engine prepared it.
        module: the one inside of it with the user's names.

    >>> model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False).eval(), nn.Linear(1, 1))
    >>> modes = TrainingModes(model, model)
    >>> modes.leave(); model = model.eval(); modes.enter()
    >>> [each.training for each in model]
    [False, True]
    """

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self._module = module
        self._stays_in_eval = not module.training and _is_frozen(module)
        frozen = [] if self._stays_in_eval else [*_frozen_in_eval(module)]
        model.train(not self._stays_in_eval)
        for each in frozen:
            each.eval()
        self._kept = Modes([model])
        self._first = self._evaluated()
        self._is_entered = True

    def state_dict(self) -> dict[str, list[str]]:
        """Return the names of the modules that have left evaluation mode, or entered it, since the stage began."""
        modes = Modes([self._module])
        if not self._is_entered:
            self._kept.restore()
        now = self._evaluated()
        modes.restore()
        return {"train": sorted(self._first - now), "eval": sorted(now - self._first)}

    def load_state_dict(self, state: Mapping[str, Iterable[str]]) -> None:
        """Load a :meth:`state_dict`; modules that are gone are left out."""
        modules = dict(self._module.named_modules())
        for mode, names in state.items():
            for name in modules.keys() & names:
                modules[name].training = mode == "train"  # not those below
        self._kept.keep()

    def _evaluated(self) -> set[str]:
        return {name for name, each in self._module.named_modules() if not each.training}

    def enter(self) -> None:
        """Return to training, also from an evaluation that the user began and did not end."""
        if not self._stays_in_eval and not self._is_as_left():
            self._kept.restore()
        self._is_entered = True

    def leave(self) -> None:
        """Remember the modes, because an evaluation begins."""
        if self._is_as_left():
            self._kept.keep()
        self._is_entered = False

    def _is_as_left(self) -> bool:
        """Return whether the modes are those of training; evaluation mode of the whole model is, if it is frozen."""
        return self._is_entered and (self._module.training or _is_frozen(self._module))


def _frozen_in_eval(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the frozen modules in evaluation mode whose parents are in training mode."""
    if module.training:
        for child in module.children():
            if not child.training and _is_frozen(child):
                yield child
            else:
                yield from _frozen_in_eval(child)


def _is_frozen(module: nn.Module) -> bool:
    trained = [each.requires_grad for each in module.parameters()]
    return bool(trained) and not any(trained)
