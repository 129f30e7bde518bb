"""The nodes' names in /etc/hosts, between two marker lines; no other line is ever touched."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from devcluster.shell import ClusterError

HOSTS = Path("/etc/hosts")


def without_block(text: str, owner: Path) -> str:
    """The text without the block of the cluster at `owner`; a block that has lost its end goes to the next marker."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.startswith("# BEGIN ddp-cluster "):
            inside = line.split()[-1] == str(owner)
        if not inside:
            kept.append(line)
        if line.startswith("# END ddp-cluster "):
            inside = False
    return "".join(kept)


def with_block(text: str, owner: Path, addresses: dict[str, str]) -> str:
    """The text with the block of the cluster at `owner` renewed; `addresses` maps a name to its address."""
    bare = without_block(text, owner)
    newline = "" if not bare or bare.endswith("\n") else "\n"
    lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
    return f"{bare}{newline}# BEGIN ddp-cluster {owner}\n{lines}# END ddp-cluster {owner}\n"


def taken_names(text: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that the text gives an address already."""
    known = {word for line in text.splitlines() for word in line.partition("#")[0].split()[1:]}
    return [name for name in names if name in known]


def refuse_taken(owner: Path, names: tuple[str, ...]) -> None:
    """Refuses node names that the machine knows already, since they would lead elsewhere."""
    if taken := taken_names(without_block(HOSTS.read_text(), owner), names):
        raise ClusterError(
            f"{HOSTS} already has an address for {', '.join(taken)}, perhaps from another cluster; choose other"
            " names with --node-prefix or --node-names"
        )


def add(owner: Path, addresses: dict[str, str]) -> None:
    """Writes the block."""
    _replace(with_block(HOSTS.read_text(), owner, addresses))


def remove(owner: Path) -> None:
    """Takes the block out again."""
    text = HOSTS.read_text()
    if (bare := without_block(text, owner)) != text:
        _replace(bare)


def _replace(text: str) -> None:
    """Replaces the file at once; in place where it is a mount, as in containers, and cannot be renamed over."""
    fresh = HOSTS.with_name(".hosts.ddp-cluster")
    try:
        fresh.write_text(text)
        shutil.copystat(HOSTS, fresh)
        owner = HOSTS.stat()
        os.chown(fresh, owner.st_uid, owner.st_gid)
        fresh.replace(HOSTS)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        HOSTS.write_text(text)
    finally:
        fresh.unlink(missing_ok=True)
