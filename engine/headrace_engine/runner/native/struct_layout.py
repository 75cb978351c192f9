"""Compares ctypes structures with the C structures that they stand for (`struct_layout.h`)."""

import ctypes

Layout = dict[str, tuple[int, int]]
"""Field name -> offset and size in bytes."""


class LayoutError(RuntimeError):
    """A ctypes structure has another layout than its C structure: one of the two declarations is out of date."""


class _FieldLayout(ctypes.Structure):
    """`field_layout` of struct_layout.h."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64))


def check_layout(library: ctypes.CDLL, c_name: str, structure: type[ctypes.Structure]) -> None:
    """Compare names, offsets and sizes of all fields, and the size of the whole.

    Args:
        library: exports the layout of `c_name` with EXPORT_LAYOUT.

    Raises:
        LayoutError: they differ, or the library does not export the layout.
    """
    expected, expected_size = _layout_in_c(library, c_name)
    name = structure.__name__
    actual = {field[0]: _offset_and_size(structure, field[0]) for field in structure._fields_}
    for field in [*expected, *(field for field in actual if field not in expected)]:
        if field not in actual:
            raise LayoutError(f"{name} lacks the field {field} of the C structure {c_name}")
        if field not in expected:
            raise LayoutError(f"{name} has the field {field}, which the C structure {c_name} lacks")
        if actual[field] != expected[field]:
            raise LayoutError(
                f"{name}.{field} is {actual[field][1]} bytes at offset {actual[field][0]}, "
                f"but {expected[field][1]} bytes at offset {expected[field][0]} in the C structure {c_name}"
            )
    if ctypes.sizeof(structure) != expected_size:
        raise LayoutError(
            f"{name} takes {ctypes.sizeof(structure)} bytes, but the C structure {c_name} takes {expected_size}"
        )


def _layout_in_c(library: ctypes.CDLL, c_name: str) -> tuple[Layout, int]:
    try:
        entry = _FieldLayout.in_dll(library, f"headrace_layout_{c_name}")
    except ValueError as error:
        raise LayoutError(f"the library does not export the layout of {c_name}: {error}") from error
    layout: Layout = {}
    while entry.name is not None:
        layout[entry.name.decode()] = entry.offset, entry.size
        entry = _FieldLayout.from_address(ctypes.addressof(entry) + ctypes.sizeof(_FieldLayout))
    return layout, entry.size


def _offset_and_size(structure: type[ctypes.Structure], field: str) -> tuple[int, int]:
    descriptor = getattr(structure, field)
    return descriptor.offset, descriptor.size
