"""Imports every public name, and prints how many there are."""

import importlib
import warnings

warnings.simplefilter("error")
count = 0
for package in ("runnerkit", "runnerkit.dl", "runnerkit.utils", "runnerkit.engines", "runnerkit.data"):
    module = importlib.import_module(package)
    count += len([getattr(module, name) for name in module.__all__])  # each is loaded on first use
print(count)
