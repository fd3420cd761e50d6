"""Ports for jobs that tests start."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)


def free_port() -> int:
    """Return a port on which no process listens, below the system's ephemeral ports.

    A job binds its port only after seconds of imports. Until then, a connection of another rank could take an ephemeral
    port.
    """
    draw = random.SystemRandom()  # tests seed the other generator
    while True:
        port = draw.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
