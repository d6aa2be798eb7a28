"""The command ``runnerkit``: a module for each thing it does, and `cli`, which names them."""
