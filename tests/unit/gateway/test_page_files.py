"""The page's files: small, without markup from text, and served with headers that block all other sources."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from headrace_gateway.page.files import POLICY

PAGE = Path(str(files("headrace_gateway.page") / "static"))
SCRIPTS = sorted(PAGE.glob("*.js"))


def test_all_files_together_have_less_than_60_kilobytes() -> None:
    assert 20_000 < sum(path.stat().st_size for path in PAGE.iterdir()) < 60_000


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_turns_text_into_markup_or_code(path: Path) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|localStorage|cookie"
    )
    assert re.findall(forbidden, path.read_text()) == []


def test_the_page_has_no_inline_script_style_or_handler_and_loads_from_itself_alone() -> None:
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"<style|style=|\son[a-z]+=", page) == []
    assert re.findall(r"<script(?![^>]*\ssrc=)", page) == []
    assert [link for link in re.findall(r'(?:src|href)="([^"]*)"', page) if not link.startswith("/page/")] == []


def test_a_form_that_no_script_handles_would_send_no_field() -> None:
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"<(?:input|select|textarea)[^>]*\sname=", page) == []


def test_every_field_has_a_label() -> None:
    page = (PAGE / "index.html").read_text()
    fields = re.findall(r'<(?:input|select|textarea)[^>]*\sid="([^"]+)"', page)
    assert len(fields) > 5
    assert set(fields) == set(re.findall(r'<label[^>]*\sfor="([^"]+)"', page))


def test_the_policy_allows_nothing_but_the_page_and_its_gateway() -> None:
    policy = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
