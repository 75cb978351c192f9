"""A ctypes structure that does not match its C structure is refused before it is used."""

from __future__ import annotations

import ctypes
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from headrace_engine.runner.native import native_library
from headrace_engine.runner.native.native_library import LayoutError, check_layout

_SOURCE = """
typedef struct {
    int32_t count;
    void *data;
    int64_t size;
} buffer;

EXPORT_LAYOUT(buffer, FIELD(buffer, count), FIELD(buffer, data), FIELD(buffer, size));
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    header = files("headrace_engine.runner.native").joinpath("struct_layout.h").read_text()
    target: Path = tmp_path_factory.mktemp("layout") / "layout.so"
    command = ["cc", *native_library._FLAGS, "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=header + _SOURCE, text=True, check=True)
    return ctypes.CDLL(str(target))


def declare(*declared: tuple[str, type]) -> type[ctypes.Structure]:
    return type("Buffer", (ctypes.Structure,), {"_fields_": declared})


COUNT, DATA, SIZE = ("count", ctypes.c_int32), ("data", ctypes.c_void_p), ("size", ctypes.c_int64)


def test_the_same_layout_is_accepted(library: ctypes.CDLL) -> None:
    check_layout(library, "buffer", declare(COUNT, DATA, SIZE))


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ((COUNT, DATA), "Buffer lacks the field size of the C structure buffer"),
        ((COUNT, DATA, SIZE, ("more", ctypes.c_int8)), "Buffer has the field more, which the C structure buffer lacks"),
        (
            (("count", ctypes.c_int64), DATA, SIZE),
            "Buffer.count is 8 bytes at offset 0, but 4 bytes at offset 0 in the C structure buffer",
        ),
        (
            (COUNT, SIZE, DATA),
            "Buffer.data is 8 bytes at offset 16, but 8 bytes at offset 8 in the C structure buffer",
        ),
    ],
    ids=["a field is missing", "a field is unknown", "a type differs", "two fields are swapped"],
)
def test_a_difference_is_refused_with_the_name_of_the_field(
    library: ctypes.CDLL, declared: tuple[tuple[str, type], ...], problem: str
) -> None:
    with pytest.raises(LayoutError) as found:
        check_layout(library, "buffer", declare(*declared))
    assert str(found.value) == problem


def test_a_library_without_the_layout_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(LayoutError, match="does not export the layout of other"):
        check_layout(library, "other", declare(COUNT))
