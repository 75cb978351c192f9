"""Sphinx's configuration of the site that `make docs` builds from this folder, and its navigation."""

import re
from pathlib import Path

project = "Headrace"
project_copyright = "the Headrace authors"
html_title = "Headrace"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt"]
# GitHub's rule for the anchors of headings, so that one link holds on both
myst_heading_anchors = 4
myst_enable_extensions = ["strikethrough"]
nitpicky = True

NAVIGATION = {
    "Start": ["quickstart", "architecture", "glossary"],
    "How to": [
        "enqueue",
        "canvas",
        "recipes",
        "subscribe",
        "workers",
        "tenants",
        "usage",
        "structured-outputs",
        "tool-calls",
        "batch",
        "gateway",
        "responses",
        "anthropic",
        "webhooks",
        "library",
        "questions",
        "embeddings",
        "lora",
        "speculative-decoding",
        "deployment",
        "upgrade",
        "compatibility",
        "backup",
        "monitoring",
        "remote-control",
    ],
    "Reference": ["reference/index", "wire", "sampling", "models", "quantization", "engines", "vllm"],
    "Background": ["dependability", "determinism", "performance", "scale", "gpu", "neuron", "decisions/README"],
    "Runbooks": ["runbooks/README"],
}
_SECTIONS = {
    "reference/index": ["settings", "cli", "metrics", "errors", "redis-keys", "sampling-params"],
    "decisions/README": ["0*"],
    "runbooks/README": ["*"],
}


def _toctree(pages, caption=None):
    lines = [":hidden:", ":glob:"] + ([f":caption: {caption}"] if caption else [])
    return "\n".join(["", "```{toctree}", *lines, "", *pages, "```", ""])


def _offer_pages_outside(app, docname, content):
    """Turn links to Markdown files outside this folder into downloads, since the site has no pages for them."""
    folder = Path(app.srcdir, docname).parent

    def link(match):
        is_inside = (folder / match["path"]).resolve().is_relative_to(app.srcdir)
        return match[0] if is_inside else f"](path:{match['path']})"

    content[0] = re.sub(r"\]\((?P<path>\.\./[^)#\s]+\.md)\)", link, content[0])


def _append_navigation(_app, docname, content):
    """Append the toctrees at the build: GitHub would show toctrees in the files as code."""
    if docname == "index":
        named = {page for pages in NAVIGATION.values() for page in pages}
        rest = sorted({path.stem for path in Path(__file__).parent.glob("*.md")} - named - {"index"})
        trees = NAVIGATION | ({"More": rest} if rest else {})
        content[0] += "".join(_toctree(pages, caption) for caption, pages in trees.items())
    elif docname in _SECTIONS:
        content[0] += _toctree(_SECTIONS[docname])


def setup(app):
    app.connect("source-read", _offer_pages_outside)
    app.connect("source-read", _append_navigation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
