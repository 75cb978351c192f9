"""Draws one bar per figure as an SVG file."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

_BAR, _GAP, _LABELS, _WIDTH = 24, 10, 280, 420


def bars(path: str, title: str, values: Mapping[str, float]) -> None:
    """Args:
    path: the file to write.
    values: lengths of the bars by label; none is negative.
    """
    most = max(values.values(), default=0.0) or 1.0
    height = 44 + len(values) * (_BAR + _GAP)
    width = _LABELS + _WIDTH + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24" font-weight="bold">{escape(title)}</text>',
    ]
    for position, (label, value) in enumerate(values.items()):
        top = 40 + position * (_BAR + _GAP)
        length = _WIDTH * value / most
        parts += [
            f'<text x="{_LABELS - 8}" y="{top + 17}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{_LABELS}" y="{top}" width="{length:.1f}" height="{_BAR}" fill="#3b78b4"/>',
            f'<text x="{_LABELS + length + 6:.1f}" y="{top + 17}">{value:.1f}</text>',
        ]
    Path(path).write_text("\n".join([*parts, "</svg>"]))
