"""Ports for jobs that tests start."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to connections.

    A job binds it only after seconds of imports. Until then, one of the many connections of other ranks could get it,
    if the system chose it.
    """
    draw = random.SystemRandom()  # tests seed the other generator
    while True:
        port = draw.choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
