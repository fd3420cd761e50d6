"""Tables of refusals: the rules of a job, and every error message of the package with its remedy.

A message is read off the ``raise`` in the source; what differs from run to run is shown as an ellipsis.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from megatron.zero_bubble.planning import exclusions
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.graph_exclusions import GRAPHS
from megatron.zero_bubble.planning.job.effects import EFFECTS, Effect, Job
from megatron.zero_bubble.planning.job.flags import as_given
from megatron.zero_bubble.planning.job.overlaps import OVERLAPS
from megatron.zero_bubble.planning.observations import Observations
from megatron.zero_bubble.planning.ranges import RANGES
from megatron.zero_bubble.planning.rule import Fits
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Named, Setup, Validated
from site_parts.markdown import code, table

_ROOT = Path(__file__).parent.parent.parent
_PACKAGE, _LOOP = _ROOT / "megatron/zero_bubble", _ROOT / "examples/pretrain"
_ERRORS = {
    "UserError",
    "PlanError",
    "TooLarge",
    "ScheduleError",
    "SeamError",
    "PatchError",
    "PeerError",
    "ArgumentTypeError",
}
_ELLIPSIS = "…"
_FEWEST_LETTERS = 12
"""A message with fewer of its own is put together elsewhere."""
_NO_REMEDY = {"got", "it", "line", "only", "so", "the", "these", "this", "when", _ELLIPSIS}
"""First words of the last part of a message that has no remedy."""
_NAMES = {
    "AUTO": "auto",
    "ZB_AUTO": "zb-auto",
    "column": "COLUMN",
    "flag": "FLAG",
    "form": "FORM",
    "key": "KEY",
    "path": "FILE",
    "where": "PART",
}
"""Variables in messages that are shown by a word instead of an ellipsis."""
_H1 = Setup(Named("zb-h1"))
_JOBS = (
    RunOptions(),
    RunOptions(_H1),
    RunOptions(Setup(step=Validated())),
    RunOptions(observations=Observations(trace="x")),
    RunOptions(_H1, Observations(trace="x")),
    RunOptions(_H1, Observations(trace="x", trace_iterations=(range(9, 10),))),
)
"""Example jobs; the rules are tried on each of them, with and without Megatron-LM."""
_TRAIN_ITERS = 2
"""Iterations of the example jobs."""
HONOURED = {
    "overlap_param_gather_with_optimizer_step": "nothing reads the order of chunks: the first one's weights are "
    "gathered in the step, those of others when they are first used",
    "cuda_graph_impl": "layers are captured once per microbatch in flight: one by one by `transformer_engine`, where "
    "weight gradients that cannot wait for W run in B, and those of a stage together by `local`",
    "overlap_moe_expert_parallel_comm": "the pairs of a schedule do it (`--zero-bubble-overlap-experts`)",
    "use_transformer_engine_op_fuser": "grouped linears of experts keep their weight gradients for W "
    "(TransformerEngine 2.14 and newer); a fused dense MLP computes them in B, and plans count them there",
    "moe_paged_stash": "its manager is informed when an iteration begins, and records its order again when a schedule "
    "changes; W holds what B has fetched",
    "moe_expert_rank_capacity_factor": "Megatron repeats an iteration whose experts overflow",
    "fine_grained_activation_offloading": "its manager is informed when an iteration ends; with several stages per "
    "rank it is refused, because it brings back what they saved in the order of Megatron's interleaved schedule",
    "tp_comm_overlap": "but for the parts below",
}
"""Options of recipes that no schedule refuses, and how they are honoured."""
_SHARED = "W must not find its operands in buffers that the next layer overwrites"
GROUPS = {
    "job": ("planning/job", "integration/bridge"),
    "megatron-lm": ("integration/megatron_lm",),
    "training": ("planning/job/arguments", "pretrain"),
    "command": ("cli", "planning", "core/search", "core/schedules", "core/costs", "core/render"),
    "files": ("core/formats", "core/ir"),
    "plans": ("core/plan", "core/analysis"),
    "versions": ("integration/patching", "engine/platforms"),
    "transformer-engine": ("engine/wgrad",),
    "run": ("integration/adapter", "engine/runtime", "engine/optimizer", "engine/measure", "engine/kernels"),
}
"""The packages whose messages a table lists, by the table's name; ``pretrain`` is the training loop."""


def of_flags() -> str:
    """What each of our options has an effect with."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for rule in EFFECTS:
        text = f"works only with {rule.needs.words}{rule.why.format(schedule=_ELLIPSIS, last=_ELLIPSIS)}"
        names = rows.setdefault((_refused_in(rule), text, rule.remedy(as_given)), [])
        names.append(_flag(rule.name))
    listed = [(", ".join(names), *key) for key, names in rows.items()]
    return table(("flag", "in", f"message, after the flag ({_ELLIPSIS}: your value)", "remedy"), listed)


def _flag(field: str) -> str:
    return code(next((f"--zero-bubble-{option.flag}" for option in DECISIONS if option.name == field), field))


def _refused_in(rule: Effect) -> str:
    """The programs in which a rule is the first to refuse its option."""
    programs = []
    for under_launcher, program in ((True, "Megatron-LM jobs"), (False, code("scripts/pretrain_gpt.py"))):
        jobs = (Job(run, under_launcher, shows_stock_passes=False, train_iters=_TRAIN_ITERS) for run in _JOBS)
        if any(_first_refusal(rule.name, job) is rule for job in jobs):
            programs.append(program)
    return "both" if len(programs) != 1 else "".join(programs)


def _first_refusal(name: str, job: Job) -> Effect | None:
    return next((each for each in EFFECTS if each.sentence({name: True}, job, as_given)), None)


def of_options() -> str:
    """The Megatron options that a choice cannot honour."""
    rows = []
    for rule in (*exclusions.OPTIONS, *RANGES, *GRAPHS):
        if not rule.is_set:
            works = rule.value.words if isinstance(rule.value, Fits) else code(repr(rule.value))
            rows.append((rule.choice.subject, code(rule.option), works, rule.why, rule.remedy))
    return table(("what needs it", "option", "what works", "because", "remedy"), rows)


def of_tuning() -> str:
    """What becomes of the options with which published recipes are tuned, under any schedule."""
    own = {rule.option: rule for rule in exclusions.OPTIONS if rule.choice is exclusions.SCHEDULE}
    off = [rule for rule in own.values() if rule.is_set]
    rows = [(code(name), "honoured", how) for name, how in HONOURED.items()]
    rows += [(code(rule.option), "switched off, with a line", rule.why) for rule in off]
    rows += [
        (code(name), "switched off, with a line, in linears that wait for W", _SHARED) for name in OVERLAPS.values()
    ]
    rows += [(code(rule.option), "refused", rule.why) for rule in own.values() if not rule.is_set]
    return table(("option", "under a schedule of this package", "because"), rows)


def of_exclusions() -> str:
    """The choices that exclude each other."""
    rows = [(rule.one.words, rule.other.words, rule.why, rule.remedy()) for rule in exclusions.EXCLUSIONS]
    return table(("choice", "other choice", "because", "remedy"), rows)


def of_group(name: str) -> str:
    """Every message of a group's packages."""
    messages = dict.fromkeys(message for package in GROUPS[name] for message in _messages().get(package, ()))
    return table((f"message ({_ELLIPSIS}: your value)", "remedy"), [_divided(message) for message in messages])


def of_schedules() -> str:
    """What a schedule is checked for, and what the refusal says."""
    rows = []
    for function in ast.parse((_PACKAGE / "core/analysis/validate.py").read_text(encoding="utf-8")).body:
        if isinstance(function, ast.FunctionDef):
            yields = [node.value for node in ast.walk(function) if isinstance(node, ast.Yield)]
            for sentence in (_text(pair.elts[0]) for pair in yields if isinstance(pair, ast.Tuple)):
                if sentence != _ELLIPSIS:
                    rows.append(((ast.get_docstring(function) or "").partition("\n\n")[0], sentence))
    return table(("rule", f"message ({_ELLIPSIS}: the pass, rank or number)"), rows)


def message(start: str) -> str:
    """The only message that begins so."""
    (found,) = {text for texts in _messages().values() for text in texts if text.startswith(start)}
    return found


def packages() -> set[str]:
    """Those that raise messages for a user."""
    return set(_messages())


@cache
def _messages() -> dict[str, list[str]]:
    """The messages of each package, in the order of the sources."""
    found: dict[str, list[str]] = {}
    for folder, name in ((_PACKAGE, Path()), (_LOOP, Path("pretrain"))):
        for path in sorted(folder.rglob("*.py")):
            for message in _raised(ast.parse(path.read_text(encoding="utf-8"))):
                package = found.setdefault(_package(name / path.relative_to(folder)), [])
                if message not in package:
                    package.append(message)
    return found


def _package(path: Path) -> str:
    """The folder of a group that holds the file, the deepest one."""
    folders = (str(folder) for folder in path.parents)
    known = {name for packages in GROUPS.values() for name in packages}
    return next((folder for folder in folders if folder in known), path.parts[0])


def _raised(tree: ast.Module) -> Iterator[str]:
    _insert_constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    for call in sorted(calls, key=lambda call: call.lineno):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        message = " ".join(_text(call.args[0]).split()) if name in _ERRORS else ""
        if sum(map(str.isalpha, message)) >= _FEWEST_LETTERS and any(map(str.isalpha, _divided(message)[0])):
            yield message


def _insert_constants(tree: ast.Module) -> None:
    """Put the module's own string constants in the place of their names in messages."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
            node.value = constants.get(node.value.id, node.value)


def _text(node: ast.expr) -> str:
    """The text of an expression, an ellipsis for what is known at run time only."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(_text, node.values))
        case ast.FormattedValue(value=ast.IfExp() | ast.Constant() as value):
            return _text(value)
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="as_flag"))):
            return f"--{_ELLIPSIS}"
        case ast.FormattedValue(value=ast.Name(id=name)) if name in _NAMES:
            return _NAMES[name]
        case ast.IfExp():
            either, other = _text(node.body), _text(node.orelse)
            optional = (either or other).strip().removeprefix("(").removesuffix(")")
            return f"{either} / {other}" if either and other else f" ({optional})"
        case ast.BinOp(op=ast.Add()):
            return _text(node.left) + _text(node.right)
    return _ELLIPSIS


def _divided(message: str) -> tuple[str, str]:
    """The rule with the values, and the remedy behind the last semicolon; none where the rule itself is the remedy."""
    rule, _, remedy = message.rpartition("; ")
    if rule and remedy == _ELLIPSIS:
        return rule, "the last part of the message"
    if message.endswith(f": {_ELLIPSIS}"):  # another message
        return message, "the last part of the message"
    if not rule or remedy.partition(" ")[0] in _NO_REMEDY:
        return message, ""
    return rule, remedy.removesuffix(f". {_ELLIPSIS}")


PARTS: dict[str, Callable[[], str]] = {
    "refusals-flags": of_flags,
    "refusals-options": of_options,
    "refusals-tuning": of_tuning,
    "refusals-exclusions": of_exclusions,
    "refusals-schedules": of_schedules,
    **{f"refusals-{name}": partial(of_group, name) for name in GROUPS},
}
