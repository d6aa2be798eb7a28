"""Addresses and network interfaces by which the machines of a job reach each other."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from ipaddress import ip_address

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

logger = logging.getLogger(__name__)

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # read by gloo: the interface on which it listens
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)
_ANY_PORT = 9  # nothing is sent there
LOOPBACK = "127.0.0.1"
_LOOPBACK_OF_MACOS = "lo0"


def route_to(host: str, port: int = _ANY_PORT) -> str:
    """Return the IP address from which this machine reaches `host`; a loopback address if `host` is this machine.

    Raises:
        OSError: the name does not resolve, or the host is unreachable.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing on a datagram socket
        return str(probe.getsockname()[0])


def set_gloo_interface(store: Store, *, rank: int, world_size: int, host: str) -> None:
    """Make gloo listen where other machines reach it, unless the user chose an interface; every rank must call this.

    By default gloo uses the address that the machine's host name resolves to, which is a loopback address on Debian.

    Args:
        host: host of the rendezvous.
    """
    own = route_to(host)
    store.set(f"address/{rank}", own)
    all_ranks = [f"address/{each}" for each in range(world_size)]
    addresses = {each.decode() for each in store.multi_get(all_ranks)}
    elsewhere = sorted(address for address in addresses - {own} if not is_loopback(address))
    if INTERFACE_VARIABLE in os.environ or not elsewhere:
        return
    if sys.platform != "linux":
        logger.warning(
            "gloo listens where this machine's host name resolves to; finding the network interface that reaches %s "
            "needs Linux: if the processes do not connect, set %s to its name", elsewhere[0], INTERFACE_VARIABLE,
        )  # fmt: skip
        return
    interface = interface_of(route_to(elsewhere[0]) if is_loopback(own) else own)
    if interface is not None:
        os.environ[INTERFACE_VARIABLE] = interface


def set_gloo_loopback() -> None:
    """Make gloo listen on the loopback only, unless the user chose an interface; every rank must call this."""
    interface = interface_of(LOOPBACK) if sys.platform == "linux" else _LOOPBACK_OF_MACOS
    if interface is not None:
        os.environ.setdefault(INTERFACE_VARIABLE, interface)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IP address, on Linux; None if it is not found.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    for _, name in socket.if_nameindex():
        if address in (_ipv4_of(name), *_ipv6_of(name)):
            return name
    return None


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return ip_address(address.split("%")[0]).is_loopback


def _ipv4_of(interface: str) -> str | None:
    import fcntl  # missing on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()))
        except OSError:
            return None  # no IPv4 address
    return socket.inet_ntoa(reply[20:24])


def _ipv6_of(interface: str) -> list[str]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return []  # the kernel lacks IPv6
    return [str(ip_address(bytes.fromhex(row[0]))) for row in rows if row[5] == interface]
