"""Kernels that a wheel contains: the fastest that the processor can run, where no compiler builds its own."""

from __future__ import annotations

import errno
import logging
import platform
import zipfile
from pathlib import Path

import pytest

from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.native import native_library, precompiled
from headrace_engine.runner.native.kernel_source import source_text
from headrace_engine.runner.native.precompiled import VARIANTS, library_name
from release_scripts import ROOT, load

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/native", "release")

KERNELS = load("kernels")
SOURCE = ROOT / "engine" / "headrace_engine" / "runner" / "elementwise" / "elementwise.c"

V3 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
PROCESSORS = {
    "Haswell": ("x86_64", V3, "x86-64-v3"),
    "Alder Lake": ("x86_64", f"{V3} avx_vnni", "x86-64-v3-vnni"),
    "Skylake-SP": ("x86_64", V4, "x86-64-v4"),
    "Ice Lake-SP": ("x86_64", f"{V4} avx512_vnni", "x86-64-v4-vnni"),
    "Zen 4": ("x86_64", f"{V4} avx512_vnni avx512_bf16", "x86-64-v4-bf16"),
    "Sapphire Rapids": ("x86_64", f"{V4} avx512_vnni avx512_bf16 avx_vnni amx_tile amx_bf16", "x86-64-v4-amx"),
    "Graviton": ("aarch64", "fp asimd evtstrm aes", "armv8-a"),
    "Sandy Bridge": ("x86_64", "fpu avx xsave", None),
}


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries that has only the kernels of elementwise.c, in the best variant for this processor."""
    for variant in VARIANTS:
        (tmp_path / "all" / variant.name).mkdir(parents=True)
    monkeypatch.setattr(precompiled, "LIBRARIES", tmp_path / "all")
    best = precompiled.best_variant()
    if best is None:
        pytest.skip("no variant runs on this processor")
    monkeypatch.setattr(KERNELS, "VARIANTS", (best,))
    monkeypatch.setattr(KERNELS, "SOURCES", [SOURCE])
    KERNELS.build(tmp_path / "libraries", platform.machine())
    monkeypatch.setattr(precompiled, "LIBRARIES", tmp_path / "libraries")
    monkeypatch.setattr(native_library, "_load_built", refuse)
    return tmp_path / "libraries"


def refuse(source_name: str, _source: str, compiler: str) -> None:
    raise native_library.CompilerError(f"{compiler} cannot build {source_name}")


@pytest.mark.parametrize(("compiler", "level"), [("no-such-compiler", logging.INFO), ("true", logging.WARNING)])
def test_without_a_working_compiler_precompiled_kernels_are_loaded(
    libraries: Path, compiler: str, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    native_ops.library.cache_clear()
    with caplog.at_level(logging.INFO):
        assert native_ops.library().headrace_gate
    native_ops.library.cache_clear()
    (record,) = [record for record in caplog.records if "precompiled kernels" in record.message]
    (variant,) = libraries.iterdir()
    assert record.levelno == level
    assert f"elementwise.c loaded: variant={variant.name} reason=" in record.message


def test_a_library_of_another_source_is_not_loaded(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    (library,) = libraries.glob("*/*.so")
    library.rename(library.with_name("elementwise-0123456789abcdef.so"))
    with pytest.raises(OSError, match="no C compiler was found"):
        native_library.load("headrace_engine.runner.elementwise", "elementwise.c")


def test_without_a_place_to_build_in_precompiled_kernels_are_loaded(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(native_library, "_load_built", full)
    assert native_library.load("headrace_engine.runner.elementwise", "elementwise.c")._name.startswith(str(libraries))


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_gets_the_fastest_kernels_that_it_can_run(processor: str) -> None:
    machine, flags, expected = PROCESSORS[processor]
    assert next((each.name for each in VARIANTS if each.runs_on(machine, flags.split())), None) == expected


def test_a_wheel_has_the_sources_and_one_with_kernels_names_its_platform(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling")
    build = load("build")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1764000000")
    build._hatchling(ROOT, tmp_path / "dist", dict(build.os.environ), "wheel")
    monkeypatch.setenv("HEADRACE_KERNELS", str(libraries))
    monkeypatch.setenv("HEADRACE_WHEEL_PLATFORM", "manylinux_2_34_x86_64")
    build._hatchling(ROOT, tmp_path / "dist", dict(build.os.environ), "wheel")
    plain, compiled = sorted(tmp_path.glob("dist/*.whl"), key=lambda path: "none-any" not in path.name)
    assert compiled.name.endswith("-py3-none-manylinux_2_34_x86_64.whl")
    names = [{*zipfile.ZipFile(wheel).namelist()} for wheel in (plain, compiled)]
    sources = {path.relative_to(ROOT / "engine").as_posix() for path in ROOT.glob("engine/headrace_engine/**/*.[ch]")}
    assert sources <= names[0] & names[1]
    assert len(sources) > 15
    library = library_name("elementwise.c", source_text("headrace_engine.runner.elementwise", "elementwise.c"))
    assert [Path(name).name for name in names[1] - names[0] if name.endswith(".so")] == [library]
    assert not [name for name in names[0] if name.endswith(".so")]
