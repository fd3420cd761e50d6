"""Tests of the CPU platform, run in other processes because they change the meaning of ``torch.cuda``."""

import importlib
import subprocess
import sys
from typing import Any

import torch

from tests.helpers.ranks import REPOSITORY, RankPool


def owner_of(point: Any) -> Any:
    module, _, name = point.owner.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, name) if name else owner


def install_and_revert(_rank: int) -> list[str]:
    """Install and revert; return the names whose identity differs afterwards."""
    from megatron.zero_bubble.engine.platforms import cpu

    cpu.revert()
    finders, absent = list(sys.meta_path), object()
    before = {(p.owner, p.name): vars(owner_of(p)).get(p.name, absent) for p in cpu.POINTS}
    mode = torch.overrides._get_current_function_mode()
    cpu.install()
    unchanged = [f"{p.owner}.{p.name}" for p in cpu.POINTS if vars(owner_of(p))[p.name] is before[p.owner, p.name]]
    cpu.revert()
    changed = [
        f"{p.owner}.{p.name}"
        for p in cpu.POINTS
        if vars(owner_of(p)).get(p.name, absent) is not before[p.owner, p.name]
    ]
    left = [str(finder) for finder in sys.meta_path if finder not in finders]
    kept = [] if torch.overrides._get_current_function_mode() is mode else ["the function mode"]
    spoke = torch.ones(1).type()
    cpu.install()
    assert not unchanged, f"install changed nothing at {unchanged}"
    assert spoke == "torch.FloatTensor"
    return changed + left + kept


def test_revert_restores_every_name(ranks: RankPool) -> None:
    assert ranks.run(1, install_and_revert) == [[]]


def cuda_means_cpu(_rank: int) -> list[str]:
    made = [
        torch.zeros(1, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 3)),
        torch.ones(1).cuda(),
        torch.ones(1).to("cuda:0"),
        torch.ones(1).to(device="cuda", dtype=torch.float64),
        torch.empty(1, device=torch.cuda.current_device()),
        torch.empty_like(torch.ones(1), device="cuda"),
        torch.nn.Linear(1, 1).cuda().weight,
    ]
    return sorted({str(tensor.device) for tensor in made})


def test_every_spelling_of_cuda_gives_a_cpu_tensor(ranks: RankPool) -> None:
    assert ranks.run(1, cuda_means_cpu) == [["cpu"]]


def type_names(_rank: int) -> tuple[list[str], torch.dtype, bool]:
    words = [torch.ones(1, dtype=dtype).type() for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    return words, torch.ones(1).type(torch.float16).dtype, torch.cuda.is_available()


def test_type_names_are_those_that_megatron_core_compares(ranks: RankPool) -> None:
    [(words, dtype, available)] = ranks.run(1, type_names)
    assert words == ["torch.cuda.FloatTensor", "torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
    assert dtype is torch.float16, "type() with an argument must still convert"
    assert available is (torch.version.cuda is not None and available), "is_available must not be changed"


def two_installations(_rank: int) -> str:
    from megatron.zero_bubble.engine.platforms import cpu

    first = torch.cuda.current_device
    cpu.install()
    assert torch.cuda.current_device is first, "a second install must do nothing"
    with torch.overrides.TorchFunctionMode():
        try:
            cpu.revert()
        except RuntimeError as error:
            return str(error)
    return "reverted"


def test_revert_rejects_other_active_function_modes(ranks: RankPool) -> None:
    [message] = ranks.run(1, two_installations)
    assert "after all torch function modes that were entered later; leave those modes first" in message


def one_more_point(_rank: int) -> list[object]:
    from megatron.zero_bubble.engine.platforms import cpu

    cpu.revert()
    seen: list[object] = []
    try:
        more = cpu.Point("torch.cuda", "device_count", lambda original: lambda: 8, "a job that counts GPUs")
        cpu.install(more=[more])
        seen.append(torch.cuda.device_count())
        cpu.revert()
        counted = torch.cuda.device_count
        for points in ((), (more,), (more,)):  # the platform first, then a job in the same process
            cpu.install(points)
        seen.append(torch.cuda.device_count())
        cpu.revert()
        seen.append(torch.cuda.device_count is counted)
        original = torch.cuda.current_device
        missing = cpu.Point("torch.cuda", "no_such_name", lambda original: None, "nobody")
        try:
            cpu.install(more=[missing])
        except RuntimeError as error:
            seen += [str(error), torch.cuda.current_device is original]
    finally:
        cpu.install()
    return seen


def test_job_can_add_points_and_missing_names_are_rejected(ranks: RankPool) -> None:
    [(count, after_platform, restored, message, put_back)] = ranks.run(1, one_more_point)
    assert (count, after_platform, restored) == (8, 8, True)
    assert put_back, "a failed installation must change nothing"
    assert "needs torch.cuda.no_such_name (nobody)" in message


def send_and_empty(rank: int, stand_in: bool) -> float:
    """Send as stock Megatron's interleaved schedule does, which empties the tensor while gloo may still read it."""
    from megatron.core.pipeline_parallel import p2p_communication

    size = 1 << 22
    group = torch.distributed.group.WORLD
    ops = p2p_communication._p2p_ops
    if not stand_in:
        ops = next(
            cell.cell_contents for cell in ops.__closure__ if getattr(cell.cell_contents, "__name__", "") == "_p2p_ops"
        )
    tensors: dict[str, Any] = dict.fromkeys(
        ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
    )
    sent = torch.full((size,), 7.0)
    tensors["tensor_send_next" if rank == 0 else "tensor_recv_prev"] = sent if rank == 0 else torch.zeros(size)
    requests = ops(**tensors, group=group, prev_pipeline_rank=0, next_pipeline_rank=1)
    if rank == 0:
        sent.data = torch.empty(1)
        reuse = [torch.full((size,), 1.0) for _ in range(8)]
        del reuse
    for request in requests.values():
        request.wait()
    received = tensors["tensor_recv_prev"]
    return 7.0 if received is None else float(received.min())


def test_sent_tensor_can_be_emptied_at_once(ranks: RankPool) -> None:
    assert ranks.run(2, send_and_empty, True) == [7.0, 7.0]


def sequence_parallel_norm(_rank: int) -> list[bool]:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    marks = []
    for parallel in (False, True):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=4,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=parallel,
        )
        norm = WrappedTorchNorm(config, 4)
        marks.append(all(getattr(parameter, "sequence_parallel", False) for parameter in norm.parameters()))
        assert config.sequence_parallel is parallel
    return marks


def test_norms_are_marked_for_sequence_parallel_reduction(ranks: RankPool) -> None:
    assert ranks.run(1, sequence_parallel_norm) == [[False, True]]


def test_megatron_core_compiles_nothing_if_imported_after_install() -> None:
    """Runs in a new process, because the pool's ranks have imported megatron-core before the platform."""
    program = (
        "import sys; from megatron.zero_bubble.engine.platforms import cpu; cpu.install(); "
        "from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train as fused; "
        "print('torch._inductor' in sys.modules, hasattr(fused, '_torchdynamo_orig_callable'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=90, check=True
    )
    assert run.stdout.split() == ["False", "False"]
