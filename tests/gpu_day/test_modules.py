"""Tests of what the steps compute, without a GPU."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import ranks
from gpu_day import engine_install, install, memory_check, pack, passes, predict, shared_nccl
from megatron.zero_bubble.ir import Compute, Kind, Pass

CHECKS = """
import pytest

def test_good(record_property):
    record_property("losses", [1.5, 1.25])

def test_bad():
    assert 1 == 2

def test_skipped():
    pytest.skip("no GPU")
"""


def run_tests(folder: Path, *selection: str) -> tuple[int, dict]:
    (folder / "test_it.py").write_text(CHECKS)
    output = folder / "out.json"
    command = [sys.executable, "-m", "gpu_day.pytests", "-c", "/dev/null", "--noconftest", str(folder / "test_it.py")]
    command += [*selection, "--device", "cpu", "--output", str(output)]
    result = subprocess.run(command, cwd=folder, env=ranks.environment(), capture_output=True, text=True, check=False)
    return result.returncode, json.loads(output.read_text())


def test_failed_tests_fail_the_step_and_are_named(tmp_path: Path) -> None:
    code, figures = run_tests(tmp_path)
    assert code == 1
    assert {name: figures[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 1, "skipped": 1}
    assert [name.rpartition("::")[2] for name in figures["failed_tests"]] == ["test_bad"]
    assert figures["recorded"] == {"test_good": {"losses": [1.5, 1.25]}}


def test_passed_tests_pass_the_step(tmp_path: Path) -> None:
    assert run_tests(tmp_path, "-k", "good")[0] == 0


def test_step_whose_tests_are_all_skipped_has_failed(tmp_path: Path) -> None:
    code, figures = run_tests(tmp_path, "-k", "skipped")
    assert code == 1 and figures["skipped"] == 1


@pytest.mark.parametrize(
    ("spans", "share"),
    [([(0, 10)], 0.0), ([(0, 4), (6, 10)], 0.2), ([(5, 10), (0, 4), (1, 2), (3, 6)], 0.0), ([(3, 3)], 0.0)],
)
def test_idle_share(spans: list[tuple[float, float]], share: float) -> None:
    assert passes.idle_share(spans) == pytest.approx(share)


def test_idle_share_is_unknown_without_kernels() -> None:
    assert passes.idle_share([]) is None


def test_split_passes_are_compared_with_stock() -> None:
    def row(variant: str, f: float, b: float, w: float) -> dict:
        costs = {"forward_ms": [f], "backward_ms": [b], "wgrad_ms": [w]}
        return {"variant": variant, "host_ms": 0.25, "costs": costs}

    figures = passes.figures([row(passes.STOCK, 2.0, 6.0, 0.0), row(predict.FUSED, 2.0, 5.0, 3.0)])
    assert (figures["stock_backward_ms"], figures["wgrad_ms"], figures["split_over_stock"]) == (6.0, 3.0, 1.25)


def test_host_clock_counts_only_passes() -> None:
    times: Iterator[float] = iter([0.0, 0.002, 1.0, 1.004])
    clock = passes.HostClock(lambda: next(times))
    for kind in (Kind.F, Kind.B):
        work = Compute(Pass(kind, 0, 0))
        clock.begin(work)
        clock.end(work)
    assert clock.ms_per_pass() == pytest.approx(3.0)


def test_file_is_joined_from_its_parts(tmp_path: Path) -> None:
    whole = tmp_path / "some-engine-2.0-py3.whl"
    whole.write_bytes(bytes(range(256)) * 41)
    parts = list(pack.split(whole, 1000, tmp_path))
    assert len(parts) == 11 and all(part.stat().st_size <= 1000 for part in parts)
    (tmp_path / "joined").mkdir()
    joined = engine_install.join(parts[::-1], tmp_path / "joined")
    assert joined.name == whole.name and joined.read_bytes() == whole.read_bytes()
    with pytest.raises(SystemExit, match=r"needs parts 0 to 10 .*, got \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\]; carry all"):
        engine_install.join(parts[:-1], tmp_path / "joined")
    with pytest.raises(SystemExit, match=r"got \[\]"):
        engine_install.join([], tmp_path / "joined")


def fat_binary(*images: tuple[int, bytes]) -> bytes:
    """As in a library of CUDA: a header, then one header and the code for every architecture."""
    parts = b"".join(
        struct.pack("<HHIQIIIIQQQQ", 2, 1, 64, len(code), 0, 0, 0, architecture, 0, 0, 0, 0) + code
        for architecture, code in images
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(parts)) + parts


def test_packed_nccl_has_the_code_of_one_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = b"o" * 24, b"n" * 40
    host = b"\x7fELF host code ."
    library = host + fat_binary((80, old), (90, new)) + host + fat_binary((90, new), (120, old)) + host
    with zipfile.ZipFile(tmp_path / "nccl.whl", "w") as wheel:
        wheel.writestr("nvidia/nccl/lib/libnccl.so.2", library)
        wheel.writestr("nvidia/nccl/include/nccl.h", "")
    shared_nccl.pack(tmp_path / "nccl.whl", 90, tmp_path)
    monkeypatch.setattr(shared_nccl, "LIBRARY", tmp_path / "unpacked/libnccl.so.2")
    shared_nccl.unpack(tmp_path / shared_nccl.PACKED)
    assert shared_nccl.LIBRARY.read_bytes() == library.replace(old, bytes(24))
    with pytest.raises(SystemExit, match="no code for sm_75"):
        shared_nccl.slim(bytearray(library), 75)


def test_install_without_packages_names_the_remedy() -> None:
    with pytest.raises(SystemExit, match=r"gpu_day\.sh pack"):
        install.install([])


def test_only_extensions_for_this_python_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = install.sysconfig.get_config_var("EXT_SUFFIX")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    for folder in install.EXTENSIONS.values():
        (tmp_path / folder).mkdir(parents=True)
    built = [tmp_path / f"{name}{end}" for name in install.EXTENSIONS for end in (suffix, ".cpython-27-other.so")]
    for path in built:
        path.write_text(path.name)
    assert install.copy_extensions(built) == [f"_ops{suffix}", f"_planner{suffix}"]
    assert (tmp_path / f"megatron/zero_bubble/search/_planner{suffix}").read_text() == f"_planner{suffix}"


def test_packed_versions_are_the_tested_ones() -> None:
    assert pack.pinned("megatron-core").count(".") == 2
    with pytest.raises(SystemExit, match="has no line"):
        pack.pinned("no-such-package")


def test_spinning_kernel_takes_a_whole_multiprocessor(tmp_path: Path) -> None:
    """Compiled for Hopper, a block takes all 65536 registers, of which none is spilled, and polls in a loop."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gpu_day import spin

    types = {"flag": "*i32", "ended": "*i32", "values": "*fp32", "limit_ns": "i64", "HELD": "constexpr"}
    source = ASTSource(spin.spin, signature=types, constexprs={"HELD": spin.HELD})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": spin.NUM_WARPS})
    cubin = tmp_path / "spin.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "REG:64 STACK:0" in usage, usage
    assert 64 * 32 * spin.NUM_WARPS == 65536
    assert compiled.asm["ptx"].count("ld.volatile") > 32 and "bra" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", ({"products": 20, "errors": 0}, 0)),
        (9, "========= ERROR SUMMARY: 2 errors", ({"products": 20, "errors": 2}, 9)),
        (0, "========= ERROR SUMMARY: 1 error", ({"products": 20, "errors": 1}, 1)),
        (0, "nothing", ({"products": 20, "errors": None}, 1)),
        (
            1,
            "========= Error: Device not supported. Exiting.",
            ({"skip_reason": "compute-sanitizer does not support this device"}, 0),
        ),
    ],
)
def test_memory_checker_that_refuses_the_device_is_skipped(code: int, text: str, expected: tuple[dict, int]) -> None:
    assert memory_check.outcome(code, text) == expected


@pytest.mark.full
def test_prediction_takes_the_shorter_of_both_placements(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward_ms": 33.0, "backward_ms": 35.0, "wgrad_ms": 16.0, "comm_ms": 0.5}))
    bubbles = predict.compared(costs, 2)
    assert bubbles["zb-auto"]["span"] <= bubbles["zb-v"]["span"]
