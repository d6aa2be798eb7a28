"""Ports that stay free until a test's process listens on them."""

import random
import socket

# Systems give outgoing connections ports above these (32768 on Linux, 49152 elsewhere). A port found by binding to 0
# comes from the same range, so that a connection of another process may take it before the test listens.
_PORTS = range(10_000, 32_000)


def free_port():
    """Return a port of 127.0.0.1 on which nothing listens, and which no outgoing connection is given."""
    return free_ports(1)[0]


def free_ports(number):
    """Return several such ports, all different."""
    in_any_order = random.SystemRandom().sample(_PORTS, len(_PORTS))  # the global generator is seeded alike everywhere
    free = filter(_is_free, in_any_order)
    return [next(free) for _ in range(number)]


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
