"""Tests of what the steps compute, without a GPU."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from bench import ranks
from gpu_day import algorithms, graphs, install, memory_check, pack, passes, predict, pytests, shared_nccl, slim
from megatron.zero_bubble.core.ir import Compute, Kind, Pass

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


def test_step_whose_tests_are_refused_is_skipped(tmp_path: Path) -> None:
    """The package's own refusal on this machine; any other skipped test shows nothing."""
    refusing = "import pytest\n\ndef test_refused():\n    pytest.skip('refused: needs queues')\n"
    (tmp_path / "test_refused.py").write_text(refusing)
    code, figures = run_tests(tmp_path, str(tmp_path / "test_refused.py"), "-k", "refused")
    assert code == 0 and figures["skip_reason"] == f"{pytests.REFUSED}needs queues"


@pytest.mark.parametrize(
    ("spans", "share"),
    [([(0, 10)], 0.0), ([(0, 4), (6, 10)], 0.2), ([(5, 10), (0, 4), (1, 2), (3, 6)], 0.0), ([(3, 3)], 0.0)],
)
def test_idle_share(spans: list[tuple[float, float]], share: float) -> None:
    assert passes.idle_share(spans) == pytest.approx(share)


def test_busy_time_counts_what_overlaps_once() -> None:
    assert passes.busy([(0.0, 2.0), (1.0, 1.5), (1.0, 3.0), (5.0, 6.0)]) == pytest.approx(4.0)
    assert passes.busy([]) == 0.0


def test_idle_share_is_unknown_without_kernels() -> None:
    assert passes.idle_share([]) is None


def test_split_passes_are_compared_with_stock() -> None:
    def row(variant: str, f: float, b: float, w: float) -> dict:
        costs = {"forward_ms": [f], "backward_ms": [b], "wgrad_ms": [w]}
        return {"variant": variant, "host_ms": 0.25, "costs": costs}

    figures = passes.figures([row(passes.STOCK, 2.0, 6.0, 0.0), row(predict.FUSED, 2.0, 5.0, 3.0)])
    assert (figures["stock_backward_ms"], figures["wgrad_ms"], figures["split_over_stock"]) == (6.0, 3.0, 1.25)


def test_graphs_are_compared_with_the_time_that_the_device_computes() -> None:
    def row(ms: float, busy: float | None) -> dict[str, Any]:
        return {"iteration_ms": ms, "busy_ms": busy, "host_ms": 0.5, "memory": {"reserved": 2**31}}

    found = graphs.figures({"eager": row(10.0, 1.0), "graphs": row(1.25, 1.0)})
    assert (found["eager_over_busy"], found["graphs_over_busy"]) == (pytest.approx(10.0), pytest.approx(1.25))
    assert (found["graphs_ms"], found["graphs_reserved_gib"]) == (1.25, 2.0)
    assert math.isnan(graphs.figures({"eager": row(10.0, None)})["eager_over_busy"])


def test_best_algorithm_is_compared_with_the_first() -> None:
    rows = [{"weight": "qkv", "us": [100.0, 98.0, 120.0]}, {"weight": "fc1", "us": [100.0, 130.0]}]
    found = algorithms.figures(rows)
    assert (found["gain"], found["most"], found["count"]) == (pytest.approx(0.01), pytest.approx(0.02), 3)


def test_host_clock_counts_only_passes() -> None:
    times: Iterator[float] = iter([0.0, 0.002, 1.0, 1.004])
    clock = passes.HostClock(lambda: next(times))
    for kind in (Kind.F, Kind.B):
        work = Compute(Pass(kind, 0, 0))
        clock.begin(work)
        clock.end(work)
    assert clock.ms_per_pass() == pytest.approx(3.0)


def wheel(folder: Path, name: str, file: str) -> Path:
    """A wheel with one file."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with ZipFile(path, "w") as files:
        files.writestr(file, "")
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{info}/RECORD", "")
    return path


def test_packages_that_share_a_folder_are_installed_together(tmp_path: Path) -> None:
    """As TransformerEngine's three: with a command for each, the last one would remove the folder of the others."""
    wheels = [wheel(tmp_path, name, f"engine/{name}/lib.py") for name in ("core", "python", "torch")]
    pack.install_together(wheels, tmp_path / "site", sys.executable)
    assert sorted(path.parent.name for path in (tmp_path / "site").rglob("lib.py")) == ["core", "python", "torch"]


def test_packed_packages_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, site = tmp_path / "packed", tmp_path / "site"
    monkeypatch.setattr(install, "PACKED", packed)
    monkeypatch.setattr(install, "SITE", site)
    install.unpack()
    assert not site.exists(), "nothing was packed"
    monkeypatch.syspath_prepend(site)
    assert find_spec("packed_package") is None
    (tmp_path / "made").mkdir()
    (tmp_path / "made/packed_package.py").write_text("")
    shutil.make_archive(str(packed / "site"), "xztar", tmp_path / "made")
    install.unpack()
    assert find_spec("packed_package") is not None
    (site / "packed_package.py").unlink()
    install.unpack()
    assert not (site / "packed_package.py").exists(), "unpacked again"


def test_torch_extension_is_built_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build script would try one without a timeout, and would not find all headers; built once, it is kept."""
    calls: list[tuple[str, dict[str, str] | None]] = []

    def pip(_: str, command: str, *arguments: str, variables: dict[str, str] | None = None) -> None:
        calls.append((command, variables))
        if command == "wheel":
            (tmp_path / "engine-2.16.1-2.11.0").mkdir()
            (tmp_path / "engine-2.16.1-2.11.0/extension.whl").write_text("")

    monkeypatch.setattr(pack, "FOLDER", tmp_path)
    monkeypatch.setattr(pack, "_pip", pip)
    monkeypatch.setattr(pack, "_ask", lambda _, code: "2.11.0" if "torch" in code else "/nvidia")
    for number in range(2):
        pack.build_engine("2.16.1", "/venv/bin/python", tmp_path / f"wheels-{number}")
        assert (tmp_path / f"wheels-{number}/extension.whl").exists()
    ((_, variables),) = (call for call in calls if call[0] == "wheel")
    assert variables is not None and variables["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
    assert variables["CUDA_HOME"] == "/nvidia/cu13" and variables["NVTE_BUILD_USE_NVIDIA_WHEELS"] == "1"


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
    with ZipFile(tmp_path / "nccl.whl", "w") as wheel:
        wheel.writestr("nvidia/nccl/lib/libnccl.so.2", library)
        wheel.writestr("nvidia/nccl/include/nccl.h", "")
    monkeypatch.setattr(shared_nccl.subprocess, "run", lambda *_, **__: None)  # strip, which takes real libraries only
    shared_nccl.pack(tmp_path / "nccl.whl", 90, tmp_path)
    monkeypatch.setattr(shared_nccl, "LIBRARY", tmp_path / "unpacked/libnccl.so.2")
    shared_nccl.unpack(tmp_path / shared_nccl.PACKED)
    assert shared_nccl.LIBRARY.read_bytes() == library.replace(old, bytes(24))
    with pytest.raises(SystemExit, match="no code for sm_75"):
        slim.slim(bytearray(library), 75)


def test_only_extensions_for_this_python_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = install.sysconfig.get_config_var("EXT_SUFFIX")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "PACKED", tmp_path / "packed")
    for folder in (*install.EXTENSIONS.values(), "packed/extensions"):
        (tmp_path / folder).mkdir(parents=True)
    for name in install.EXTENSIONS:
        for end in (suffix, ".cpython-27-other.so"):
            (tmp_path / f"packed/extensions/{name}{end}").write_text(f"{name}{end}")
    assert install.copy_extensions() == [f"_ops{suffix}", f"_planner{suffix}"]
    assert (tmp_path / f"megatron/zero_bubble/core/search/_planner{suffix}").read_text() == f"_planner{suffix}"


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
