"""Case f: the CPU time of an import."""

import importlib
import json
import sys
import time


def import_s(module: str) -> float:
    """Return the CPU seconds needed to import the module and its public names."""
    begin = time.process_time()
    imported = importlib.import_module(module)
    for name in imported.__all__:  # runnerkit imports names on first access
        getattr(imported, name)
    return time.process_time() - begin


def main() -> None:
    """Import torch, then the module given as argument."""
    torch_s = import_s("torch")
    seconds = torch_s + import_s(sys.argv[1])
    print(json.dumps({"cpu_s": seconds, "of_torch": seconds / torch_s, "modules": len(sys.modules)}))


if __name__ == "__main__":
    main()
