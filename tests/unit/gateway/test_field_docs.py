"""docs/gateway.md lists every field: accepted, accepted without effect, refused."""

from pathlib import Path

from headrace_gateway.requests import field_tables

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"


def _names(names: set[str] | frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def fields_of_the_tables() -> str:
    """Return the tables that the page must contain."""
    both = field_tables.COMMON | field_tables.SAMPLING.keys()
    rows = [
        "| | fields |",
        "|---|---|",
        f"| both endpoints | {_names(both)} |",
        f"| chats only | {_names(field_tables.CHAT - field_tables.COMMON)} |",
        f"| completions only | {_names(field_tables.COMPLETION - field_tables.COMMON)} |",
        "",
        "| accepted without effect | |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in sorted(field_tables.IGNORED.items())),
        "",
        "| refused | |",
        "|---|---|",
    ]
    reasons: dict[str, set[str]] = {}
    for name, instead in field_tables.REFUSED.items():
        reasons.setdefault(instead, set()).add(name)
    rows += sorted(f"| {_names(names)} | {instead} |" for instead, names in reasons.items())
    return "\n".join(rows)


def fields_of_responses() -> str:
    """Return the tables of docs/responses.md."""
    sampling = field_tables.SAMPLING.keys() - field_tables.RESPONSE_REFUSED.keys()
    reasons: dict[str, set[str]] = {}
    for name, instead in field_tables.RESPONSE_REFUSED.items():
        reasons.setdefault(instead, set()).add(name)
    rows = ["| | fields |", "|---|---|", f"| served | {_names(field_tables.RESPONSE)} |"]
    rows += [f"| sampling, as in chats | {_names(sampling)} |"]
    rows += [f"| accepted without effect | {_names(set(field_tables.IGNORED))} |", "", "| refused | |", "|---|---|"]
    rows += sorted(f"| {_names(names)} | {instead} |" for instead, names in reasons.items())
    return "\n".join(rows)


def test_the_page_of_responses_lists_the_fields_of_its_tables() -> None:
    page = PAGE.with_name("responses.md").read_text()
    assert fields_of_responses() in page, "write this into docs/responses.md:\n" + fields_of_responses()


def fields_of_messages() -> str:
    """Return the tables of docs/anthropic.md."""
    reasons: dict[str, set[str]] = {}
    for name, instead in field_tables.MESSAGES_REFUSED.items():
        reasons.setdefault(instead, set()).add(name)
    rows = ["| | fields |", "|---|---|", f"| served | {_names(field_tables.MESSAGES)} |"]
    rows += [f"| served by `count_tokens` | {_names(field_tables.COUNTED_MESSAGES)} |", ""]
    rows += ["| accepted without effect | |", "|---|---|"]
    rows += [f"| `{name}` | {why} |" for name, why in sorted(field_tables.MESSAGES_IGNORED.items())]
    rows += ["", "| refused | |", "|---|---|"]
    rows += sorted(f"| {_names(names)} | {instead} |" for instead, names in reasons.items())
    return "\n".join(rows)


def test_the_page_of_messages_lists_the_fields_of_its_tables() -> None:
    page = PAGE.with_name("anthropic.md").read_text()
    assert fields_of_messages() in page, "write this into docs/anthropic.md:\n" + fields_of_messages()


def test_the_page_lists_the_fields_of_the_tables() -> None:
    assert fields_of_the_tables() in PAGE.read_text(), "write this into docs/gateway.md:\n" + fields_of_the_tables()
