"""The ``runnerkit`` command line: `cli` declares the commands, `arguments` what they share, others implement them."""
