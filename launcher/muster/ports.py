"""Which ports the ranks may meet on, and taking two of them."""

from __future__ import annotations

import errno
import hashlib
import socket
from pathlib import Path

from ..errors import RendezvousError

_NETWORK = Path("/proc/sys/net/ipv4")
_REGIONS = ((10001, 19997), (30000, 35533))
"""(lowest port, number of ports), each number a prime. 30000-32767 belongs to Kubernetes: only a second choice."""
_PORTS_PER_ATTEMPT = 1024
_GOLDEN = 0.6180339887498949
_SERVICES = frozenset(
    [
        *(10050, 10051, *range(10248, 10260), 10514, 11211, 11311, 12345, 15672, 16379, 18080, 18888, 19531, 19999),
        *(20000, 20048, 20049, 24007, 24008, 25672, 26257, *range(27015, 27020), 28015, 29400, 29500, 50051, 50070),
    ]
)
"""Ports above 10000 where well-known services listen, torch's own defaults 29400 and 29500 among them."""


def port_candidates(key: str, attempt: int, count: int = 16) -> list[int]:
    """Ports to try in turn: a function of (key, attempt), the same on every host with the same port settings.

    All lie above 10000, outside the ephemeral range, the ports that the machine reserves and well-known services;
    within 19 successive attempts of a key none comes twice. On a machine whose ephemeral range covers nearly all ports
    above 10000 the range can't be avoided, and the list is chosen as if it did not exist.
    """
    low, high = _ephemeral_range()
    return _candidates(key, attempt, count, range(low, high + 1), _reserved_ports())


def foreign_candidates(key: str, attempt: int, count: int = 32) -> list[int]:
    """Where a head with other port settings than this host's would listen, the likeliest first."""
    near, far = (_block(key, attempt, region)[:count] for region in _REGIONS)
    return near + far


def take_ports(candidates: list[int], host: str) -> tuple[socket.socket, socket.socket]:
    """Bind the first two free ports among the candidates, on all interfaces; the first one listens.

    Errors: RendezvousError when fewer than two are free.
    """
    taken: list[socket.socket] = []
    for port in candidates:
        bound = _bind(port)
        if bound is not None:
            taken.append(bound)
        if len(taken) == 2:
            taken[0].listen(4096)
            return taken[0], taken[1]
    for sock in taken:
        sock.close()
    raise RendezvousError(
        f"rank 0 on {host}: fewer than two of the ports {', '.join(map(str, candidates))} are free there"
    )


def _candidates(key: str, attempt: int, count: int, ephemeral: range, reserved: frozenset[int]) -> list[int]:
    chosen: list[int] = []
    for region in _REGIONS:
        allowed = [port for port in _block(key, attempt, region) if port not in reserved]
        outside = [port for port in allowed if port not in ephemeral]
        if len(outside) >= count:
            return outside[:count]
        chosen = chosen or allowed[:count]
    return chosen


def _block(key: str, attempt: int, region: tuple[int, int]) -> list[int]:
    """The ports of one attempt, no two attempts' alike until the region is used up.

    A golden-ratio stride over a prime number of slots spreads every block over the whole region, so that a narrow gap
    left by the ephemeral range is still met.
    """
    lowest, size = region
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
    stride = round(size * _GOLDEN)
    slots = range(attempt * _PORTS_PER_ATTEMPT, (attempt + 1) * _PORTS_PER_ATTEMPT)
    ports = (lowest + (start + slot * stride) % size for slot in slots)
    return [port for port in ports if port not in _SERVICES]


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = (_NETWORK / "ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    except OSError:
        return 32768, 60999


def _reserved_ports() -> frozenset[int]:
    try:
        text = (_NETWORK / "ip_local_reserved_ports").read_text(encoding="ascii").strip()
    except OSError:
        return frozenset()
    spans = [item.partition("-") for item in text.split(",") if item]
    return frozenset(port for low, _, high in spans for port in range(int(low), int(high or low) + 1))


def _bind(port: int) -> socket.socket | None:
    """Bind a port that nobody uses on any interface; None where somebody does.

    It is bound without SO_REUSEADDR, which is the strict check, and gets it afterwards: torch's store, which sets it
    too, can then listen on the port while we still hold it against others.
    """
    sock = _any_socket()
    try:
        sock.bind(("", port))
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def _any_socket() -> socket.socket:
    """A socket for IPv6 and IPv4 at once, or for IPv4 where the kernel has no IPv6."""
    try:
        sock = socket.socket(socket.AF_INET6)
    except OSError:
        return socket.socket(socket.AF_INET)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return sock
