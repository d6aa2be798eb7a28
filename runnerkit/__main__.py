"""The entry point of `runnerkit`, `python -m runnerkit` and `torchrun -m runnerkit`."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> int:
    """Run the command line; without typer, print a one-line error."""
    try:
        import typer  # noqa: F401  # checked here, to avoid a traceback
    except ImportError:
        sys.stderr.write("runnerkit: the command line needs the package typer: pip install typer\n")
        return 2
    from runnerkit.commands.cli import main as run

    if isinstance(sys.stdout, TextIOWrapper):  # a pipe of Windows cannot hold all characters of a page or a curve
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.path.insert(0, "")  # find components of configs in the current folder, as `python -m` does
    return run()


if __name__ == "__main__":
    sys.exit(main())
