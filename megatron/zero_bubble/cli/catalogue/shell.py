"""The commands that a shell script would start, without starting them.

A restricted bash reads the script, so that variables, conditions, loops and functions mean what they mean in a run. It
has no path: every program that is not part of bash is recorded instead of started. Files are sourced, and nothing can
be written.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from megatron.zero_bubble.cli.catalogue.recipe import Recipe, of_command
from megatron.zero_bubble.core.errors import UserError

SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".sub")
_SECONDS, _INTERVAL = 10, 0.01
"""Time after which a script that waits for something is given up, and how often its processes are counted."""
_MOST_PROCESSES = 100
_HEAD = r"""
enable -n kill history suspend
ulimit -f 1024 -t 2 -v 4194304
exec 7>&1 1>&2
command_not_found_handle() { printf '%s\0' "$#" "$@" >&7; }
cd() { :; }
exec() { "$@"; }
set() { case "$1" in -*u*) builtin set -u ;; esac; }
dirname() { case "$1" in */*) printf '%s\n' "${1%/*}" ;; *) echo . ;; esac; }
basename() { local name="${1##*/}"; printf '%s\n' "${name%"${2:-}"}"; }
readlink() { printf '%s\n' "${!#}"; }
realpath() { readlink "$@"; }
source() {
    local ZB_SOURCE
    for ZB_SOURCE in "$1" "$ZB_ROOT/$1"; do
        if [[ -f "$ZB_SOURCE" ]]; then
            local text; text="$(<"$ZB_SOURCE")"
            shift
            eval "${text//BASH_SOURCE/ZB_SOURCE}"
            return
        fi
    done
}
.() { source "$@"; }
bash() {
    if [[ "$1" == -*c ]]; then eval "$2"; elif [[ -f "$1" ]]; then source "$@"; else command_not_found_handle "$@"; fi
}
sh() { bash "$@"; }
"""
"""What stands in front of a script: builtins that could do harm, or what they are replaced by."""
_ENDLESS, _LARGE = "it does not end", "it needs too much memory or space"
_CROWDED = f"it starts more than {_MOST_PROCESSES} processes"
_STAYS = "exit() { :; }\n"
"""What stands in front of a script that ends early, because a file or a setting is missing here."""
_WRITES = re.compile(r"(?<=[\s)])(?:[12]|&)?>>?\s*(?![&(\s])[\"'\w./${][^\s;|)]*")
_COMPARES = re.compile(r"\[\[.*>|\(\(.*>")
_HIDDEN = re.compile("^(BASH|ENV)|TOKEN|KEY|SECRET|PASSW|CREDENTIAL")
"""Variables that a script does not get: those that change bash, and secrets, which a reason could repeat."""
_PATH = re.compile(r"(?<![A-Za-z0-9_$])PATH=")
_HEADER = re.compile(r"^#SBATCH\s+--?([\w-]+)[=\s]+(\S+)", re.MULTILINE)


def recipes_of_script(file: Path, root: Path) -> Iterator[Recipe]:
    """Yield the recipes of a script, or one with the reason why it has none."""
    name = str(file.relative_to(root))
    text = file.read_text(encoding="utf-8", errors="replace")
    header = dict(_HEADER.findall(text))
    found: dict[Recipe, None] = {}
    for folder, before in ((file.parent, ""), (root, _STAYS)):  # the second where the first ends before it starts a job
        commands, why = recorded(f"{before}{text}", file, root, folder)
        read = (of_command(name, command, header) for command in commands)
        found = dict.fromkeys(recipe for recipe in read if recipe is not None)
        if found or why in (_ENDLESS, _CROWDED):
            break
    if not found:
        yield Recipe(name, problem=f"no command with the flags of a job{f': {why}' if why else ''}")
    for number, recipe in enumerate(found, 1):
        yield recipe if len(found) == 1 else Recipe(**{**vars(recipe), "name": f"{name} #{number}"})


def recorded(text: str, file: Path, root: Path, folder: Path) -> tuple[list[list[str]], str]:
    """Return the commands that a script would start, until a limit stops it, and which does, or bash's last complaint.

    Args:
        root: the folder of all scripts, in which sourced files are looked for, too.
        folder: where the script is started.

    Raises:
        UserError: there is no bash.
    """
    lines = (line if _COMPARES.search(line) else _WRITES.sub("", line) for line in text.splitlines())
    program = _PATH.sub("ZB_PATH=", "\n".join(lines)).replace("BASH_SOURCE", "ZB_SOURCE")
    if (bash := shutil.which("bash")) is None:
        raise UserError("shell scripts are read by bash; got a machine without it; install bash")
    kept = {name: value for name, value in os.environ.items() if not _HIDDEN.search(name)}
    given = {"PATH": "/nonexistent", "ZB_SOURCE": str(file), "ZB_ROOT": str(root)}
    with TemporaryFile() as out, TemporaryFile() as errors:
        why = _run([bash, "-r", "-c", f"{_HEAD}\n{program}", str(file)], folder, kept | given, out, errors)
        words, complaints = (_content(each) for each in (out, errors))
    said = [line for line in complaints.splitlines() if line.startswith(f"{file}: line ")]
    last = said[-1].split(": ", 2)[2].replace(f"{root}/", "") if said else ""
    return list(_commands(words)), why or last


def _run(command: list[str], folder: Path, variables: dict[str, str], out: IO[bytes], errors: IO[bytes]) -> str:
    """Run a program until it and all that it has started have ended; return which limit has stopped it, if one has."""
    reading, writing = os.pipe()  # of which all of these processes, and no others, have the second end open
    running = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,
        cwd=folder,
        env=variables,
        pass_fds=(writing,),
        start_new_session=True,  # so that it can stop neither this process nor outlive it
    )
    os.close(writing)
    until, why = time.monotonic() + _SECONDS, ""
    try:
        while not why and not _is_closed(reading, _INTERVAL):
            why = _ENDLESS if time.monotonic() > until else ""
            why = _CROWDED if len(_processes_of(running.pid)) > _MOST_PROCESSES else why
    finally:
        os.close(reading)
        _end(running.pid)
    ended_by = -running.wait()
    return why or (_ENDLESS if ended_by in (signal.SIGXCPU, signal.SIGKILL) else _LARGE if ended_by > 0 else "")


def _is_closed(pipe: int, seconds: float) -> bool:
    """Whether all others have closed the pipe, after waiting that long at most; what they write to it is dropped."""
    return bool(select.select([pipe], [], [], seconds)[0]) and not os.read(pipe, 4096)


def _end(session: int) -> None:
    """End all processes of a session, also those that others start meanwhile: stopped ones start none."""
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        before: set[int] = set()
        while (left := set(_processes_of(session))) - before:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, sent)
            before = left
    until = time.monotonic() + _SECONDS
    while _processes_of(session) and time.monotonic() < until:
        time.sleep(_INTERVAL)


def _processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended, where the system tells them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, own = file.read_text(errors="replace").rpartition(")")[2].split()[:4]
            found += [int(file.parent.name)] if int(own) == session and state != "Z" else []
    return found


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _commands(text: str) -> Iterator[list[str]]:
    """Divide what was recorded: of every command the number of its words, and the words, each with a zero behind it."""
    words = iter(text.split("\0")[:-1])
    for count in words:
        if not count.isdigit():
            return  # jobs in the background have written into each other's records
        command = list(islice(words, int(count)))
        if len(command) == int(count):  # all of it was written before the script was ended
            yield [part for word in command for part in _parts(word)]


def _parts(word: str) -> Sequence[str]:
    """The words of an argument that is a command, as in ``srun bash -c "torchrun ..."``; else the argument."""
    if " --" not in word or word.startswith("--"):
        return (word,)
    try:
        return shlex.split(word, comments=True)
    except ValueError:  # a quotation that does not end
        return word.split()
