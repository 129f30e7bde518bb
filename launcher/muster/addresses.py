"""Names, addresses and network interfaces of the hosts of a step."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import threading
from pathlib import Path

_SIOCGIFADDR = 0x8915
_RESOLVE_S = 3.0
"""A resolver that answers nothing may block for half a minute; a rank says so sooner."""


def resolve(host: str) -> list[str]:
    """All addresses of a name, in the resolver's order.

    Errors: OSError (socket.gaierror among them) when the name has none or the resolver takes more than 3 s.
    """
    if is_address(host):
        return [host]
    answer: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.append(list(dict.fromkeys(str(item[4][0]) for item in found)))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="resolver", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    if not answer:
        raise TimeoutError(f"the resolver has not answered for {_RESOLVE_S:.0f} s")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def is_address(host: str) -> bool:
    """Whether `host` is an address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine only."""
    return ipaddress.ip_address(plain(address)).is_loopback


def plain(address: str) -> str:
    """An address without its scope, and an IPv4 one without its IPv6 clothing: ::ffff:10.0.0.1 -> 10.0.0.1."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def own_name_is_loopback() -> bool:
    """Whether this host's name leads to the loopback address here, as Debian's 127.0.1.1 line makes it."""
    try:
        return all(is_loopback(address) for address in resolve(socket.gethostname()))
    except OSError:
        return True


def interface_of(address: str) -> str | None:
    """Name of this host's network interface that bears `address`, or None."""
    wanted = ipaddress.ip_address(plain(address))
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if answer[20:24] == wanted.packed:
                return name
    return None


def _interface_of_ipv6(packed: str) -> str | None:
    table = Path("/proc/net/if_inet6")
    lines = table.read_text(encoding="ascii").splitlines() if table.exists() else []
    return next((line.split()[5] for line in lines if line.startswith(packed)), None)
