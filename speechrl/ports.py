"""Addresses where processes of a run meet. Imports nothing heavy: it also runs in bare Ray workers."""

from __future__ import annotations

import socket


def free_address() -> tuple[str, int]:
    """The address of this Ray node and a port that was free a moment ago."""
    import ray

    return ray.util.get_node_ip_address(), free_socket_port()


def free_socket_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
