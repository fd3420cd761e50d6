"""``zero-bubble playground``: every schedule drawn and compared in a browser, for costs that are set by sliders.

The command serves one page on this machine and answers what the page asks (``server``). A question is the command
line of ``zero-bubble plan`` that the page shows, and its answer is what that command makes (``questions``): there is no
other planner, and what is copied from the page prints the same numbers.
"""

from __future__ import annotations

import argparse
import errno
import threading
import webbrowser

from megatron.zero_bubble.cli.playground.server import Server
from megatron.zero_bubble.errors import UserError


def add_playground(verb: argparse.ArgumentParser) -> None:
    """The flags of ``playground``."""
    verb.add_argument("--port", type=int, default=0, metavar="N", help="of this machine only (default: a free one)")
    verb.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    verb.set_defaults(command=playground)


def playground(options: argparse.Namespace) -> str:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: when the port cannot be had.
    """
    with _bind(options.port) as server:
        print(f"The playground is at {server.address} for this machine only; Ctrl-C ends it.", flush=True)
        if not options.no_browser:
            # A browser of the terminal returns when it is closed, and wants its page before that.
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return "\nThe playground has ended.\n"
    return ""


def _bind(port: int) -> Server:
    if not 0 <= port < 2**16:
        raise UserError(f"--port must be within 0..65535, 0 for a free one; got {port}")
    try:
        return Server(port)
    except OSError as error:
        why = "it is taken" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise UserError(f"cannot listen on port {port}: {why}; choose another, or leave --port out") from error
