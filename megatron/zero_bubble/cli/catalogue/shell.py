"""The commands that a shell script would start, without starting them.

A restricted bash reads the script, so that variables, conditions, loops and functions mean what they mean in a run. It
has no path: every program that is not part of bash is recorded instead of started. Files are sourced, and nothing can
be written.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryFile

from megatron.zero_bubble.cli.catalogue.contained import CROWDED, ENDLESS, content, run_contained
from megatron.zero_bubble.cli.catalogue.recipe import Recipe, of_command
from megatron.zero_bubble.core.errors import UserError

SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".sub")
_SECONDS = 10
"""Time after which a script that waits for something is given up."""
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
_LARGE = "it needs too much memory or space"
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
        if found or why in (ENDLESS, CROWDED):
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
        why, status = run_contained(
            [bash, "-r", "-c", f"{_HEAD}\n{program}", str(file)],
            _SECONDS,
            _MOST_PROCESSES,
            stdin=DEVNULL,
            stdout=out,
            stderr=errors,
            cwd=folder,
            env=kept | given,
        )
        if not why and status < 0:
            why = ENDLESS if -status in (signal.SIGXCPU, signal.SIGKILL) else _LARGE
        words, complaints = (content(each) for each in (out, errors))
    said = [line for line in complaints.splitlines() if line.startswith(f"{file}: line ")]
    last = said[-1].split(": ", 2)[2].replace(f"{root}/", "") if said else ""
    return list(_commands(words)), why or last


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
