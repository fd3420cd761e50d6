import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from platform import libc_ver
from types import SimpleNamespace

import pytest
import torch

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.cpu import host
from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform
from pretrain.distributed import check_backend
from pretrain.process import Launch

ROOT = Path(__file__).resolve().parents[3]


def test_unknown_device_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of cpu, cuda, auto; got 'tpu'"):
        select("tpu")


def test_cuda_without_a_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "available", lambda self: False)
    with pytest.raises(ValueError, match="needs a GPU.*use cpu or auto"):
        select("cuda")


@pytest.mark.parametrize(("has_gpu", "name", "backend"), [(True, "cuda", "nccl"), (False, "cpu", "gloo")])
def test_auto_selects_a_gpu_if_available(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, name: str, backend: str
) -> None:
    monkeypatch.setattr(CudaPlatform, "available", lambda self: has_gpu)
    platform = select("auto")
    assert (platform.name, platform.backend) == (name, backend)


def test_cpu_marks_measure_milliseconds() -> None:
    platform = select("cpu")
    before = time.perf_counter()
    start = platform.mark()
    time.sleep(0.02)
    assert platform.reached(start)
    measured_ms = platform.elapsed_ms(start, platform.mark())
    assert 20.0 <= measured_ms <= (time.perf_counter() - before) * 1e3


def test_spare_memory_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    platform, total = select("cpu"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = platform.spare_memory_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = platform.spare_memory_bytes()
    assert 0 < alone < 0.9 * total
    assert 0.8 * alone < 4 * shared < 1.2 * alone, "the machine has other work"


def test_spare_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_GROUP", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, text in {"max": "100000", "current": "95000", "stat": "inactive_file 1000"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert select("cpu").spare_memory_bytes() == 6000 * 9 // 10 // 2


def test_cpu_peak_memory_counts_touched_memory() -> None:
    platform = select("cpu")
    before = platform.peak_memory_bytes()
    held = torch.ones(before // 4)  # as many bytes as the process's peak so far
    assert platform.peak_memory_bytes() - before > before // 2
    del held


def test_gpu_marks_are_queried_on_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new thread, as the watchdog's, starts on GPU 0."""
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    class Mark:
        device = torch.device("cuda", 3)

        def query(self) -> bool:
            return current == [3]

    monkeypatch.setattr(torch.cuda, "device", on)
    assert CudaPlatform().reached(Mark())  # type: ignore[arg-type]
    assert current == [0]


@pytest.mark.gpu
def test_gpu_marks_measure_device_time() -> None:
    platform = select("cuda")
    device = platform.setup(0)
    tensor = torch.ones(4096, 4096, device=device)
    start = platform.mark()
    for _ in range(20):
        tensor = tensor @ tensor
    end = platform.mark()
    assert not platform.reached(end), "twenty products take longer than the host takes to get here"
    assert platform.elapsed_ms(start, end) > 1.0
    assert platform.reached(start) and platform.reached(end)
    assert platform.peak_memory_bytes() >= tensor.nbytes


@pytest.mark.skipif(libc_ver()[0] != "glibc", reason="the setting exists only in glibc")
def test_cpu_platform_keeps_freed_memory() -> None:
    """Otherwise every pass would request the pages of its tensors from the system again."""
    program = (
        "import resource, torch\n"
        "from megatron.zero_bubble.engine.platforms import select\n"
        "select('cpu').setup(0)\n"
        # The heap grows by one more tensor in the second or third round, and then stays constant.
        "for number in range(9):\n"
        "    if number == 4: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    kept = [torch.ones(4 << 20) for _ in range(8)]\n"
        "    del kept\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) < 4096, "one tensor of 16 MiB has 4096 pages, and 40 tensors were created"


@pytest.mark.parametrize(
    ("enabled", "version", "shares"), [("1", 23007, True), ("1", 22907, False), ("0", 23100, False)]
)
def test_gpus_are_shared_over_a_new_nccl(
    monkeypatch: pytest.MonkeyPatch, enabled: str, version: int, shares: bool
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", enabled)
    monkeypatch.setattr("megatron.zero_bubble.engine.platforms.cuda._nccl_version", lambda: version)
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=2, under_torchrun=True)
    platform = SimpleNamespace(name="cuda", device_count=lambda: 1)
    with nullcontext() if shares else pytest.raises(UserError, match="got 2 processes and 1 GPUs"):
        check_backend("nccl", platform, launch)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_gloo_is_for_cpu_ranks(name: str) -> None:
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=2, under_torchrun=True)
    platform = SimpleNamespace(name=name, device_count=lambda: 2)
    with nullcontext() if name == "cpu" else pytest.raises(UserError, match="cannot sum gradients on GPUs"):
        check_backend("gloo", platform, launch)  # type: ignore[arg-type]
