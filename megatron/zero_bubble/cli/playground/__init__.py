"""``zero-bubble playground``: draw and compare all schedules in a browser, for costs set by sliders.

The command serves one page on this machine and answers the page's requests (``server``). A request is a command line of
``zero-bubble plan``, which the page shows, and the answer is the plan that this command makes (``questions``). The
playground has no other planner, so a command copied from the page prints the same numbers.
"""

from __future__ import annotations

import argparse
import errno
import threading
import webbrowser
from pathlib import Path

from megatron.zero_bubble.cli.playground.job import PageJob, add_job, job_of
from megatron.zero_bubble.cli.playground.server import Server
from megatron.zero_bubble.cli.playground.static import PYODIDE, static_files
from megatron.zero_bubble.core.errors import UserError


def add_playground(verb: argparse.ArgumentParser) -> None:
    """Add the flags of ``playground``."""
    verb.usage = "%(prog)s [OPTION ...] [-- FLAGS]"
    verb.description = (
        "Serve a page on this machine that draws and compares all schedules, for costs set by sliders, or for those of "
        "a costs file (--costs), of a model (--config), or of a Megatron-LM job by its own flags, after --."
    )
    verb.add_argument("--port", type=int, default=0, metavar="N", help="local port to serve (default: a free port)")
    verb.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    verb.add_argument(
        "--static",
        metavar="FOLDER",
        help="write the page there with a planner that runs in the browser, for any file server, and exit",
    )
    add_job(verb)
    verb.set_defaults(command=playground)


def playground(options: argparse.Namespace) -> str:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: when the port cannot be opened, the job cannot be read, or the static page cannot be written.
    """
    if options.static is not None:
        return _write_static(options)
    with _bind(options.port, job_of(options)) as server:
        print(f"Playground running at {server.address} (this machine only); press Ctrl-C to stop it.", flush=True)
        if not options.no_browser:
            # open() of a terminal browser returns only when the browser exits, but the browser needs the page before.
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return "\nPlayground stopped.\n"
    return ""


def _bind(port: int, job: PageJob | None) -> Server:
    if not 0 <= port < 2**16:
        raise UserError(f"--port must be 0 to 65535, where 0 selects a free port; got {port}")
    try:
        return Server(port, job)
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise UserError(f"cannot listen on port {port}: {why}; choose another port, or leave --port out") from error


def _write_static(options: argparse.Namespace) -> str:
    if job_of(options) is not None:
        raise UserError("--static has settings of its own, not those of a job; leave out the job, or --static")
    folder = Path(options.static)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in static_files().items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; give another folder") from error
    return (
        f"Wrote {folder}, which needs Pyodide, a Python in WebAssembly; to add and to serve it:\n"
        f"  npm pack pyodide@{PYODIDE} && tar -xzf pyodide-{PYODIDE}.tgz && mv package {folder / 'pyodide'}\n"
        f"  python -m http.server --directory {folder}\n"
    )
