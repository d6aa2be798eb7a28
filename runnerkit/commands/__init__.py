"""The ``runnerkit`` command line: `cli` declares the commands, and one module implements each of them."""
