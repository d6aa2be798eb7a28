"""The command `runnerkit`, also as `python -m runnerkit` and `torchrun -m runnerkit`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; say in a sentence that it needs typer, if that is missing."""
    try:
        import typer  # noqa: F401  # asked for here, where no traceback comes of it
    except ImportError:
        sys.stderr.write("runnerkit: the command line needs the package typer: pip install typer\n")
        return 2
    from runnerkit.commands.cli import main as run

    sys.path.insert(0, "")  # components of configs are looked up in the current folder too, as by `python -m`
    return run()


if __name__ == "__main__":
    sys.exit(main())
