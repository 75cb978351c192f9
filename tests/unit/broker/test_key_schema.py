"""Each key is declared once, and a script with a wrong key name does not load."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import headrace_broker
import headrace_gateway
import headrace_workers
from headrace_broker.key_schema import KeySchema, span
from headrace_broker.keys import KEYS, queue_key_types
from headrace_broker.queue.leases import SCRIPTS
from headrace_broker.scripts import LuaScript, compose
from headrace_gateway.redis import claims
from headrace_gateway.redis import keys as redis_keys

PACKAGES = {headrace_broker: KEYS, headrace_gateway: redis_keys.KEYS}
LUA_FUNCTIONS = {"error", "ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack"}
LUA = [path for package in PACKAGES for path in Path(str(package.__file__)).parent.rglob("*.lua")]


def make_schema() -> KeySchema:
    schema = KeySchema({"WORD": "it's"})
    schema.fixed("counts", "h:counts", "hash", ("worker",), "for ever", "Counts.")

    @schema.built("stream", ("worker",), "a day")
    def stream_key(request_id: str) -> str:
        """A stream."""
        return f"h:stream:{request_id}"

    @schema.built("zset", ("worker",), "a day")
    def member_key(list_name: str, tenant: str) -> str:
        """Members."""
        return f"h:of:{list_name}\x06{tenant}:x"

    return schema


def test_a_schema_contains_the_declared_keys() -> None:
    schema = make_schema()
    assert [(key.name, key.pattern, key.type) for key in schema] == [
        ("counts", "h:counts", "hash"),
        ("stream", "h:stream:<request_id>", "stream"),
        ("member", "h:of:<list_name>\x06<tenant>:x", "zset"),
    ]
    assert schema["stream"].holds == "A stream."


def test_two_keys_of_one_name_or_pattern_are_refused() -> None:
    schema = make_schema()
    with pytest.raises(ValueError, match="two keys have the name counts"):
        schema.fixed("counts", "h:other", "hash", ("worker",), "for ever", "")
    with pytest.raises(ValueError, match="two keys have the pattern"):
        schema.fixed("others", "h:counts", "hash", ("worker",), "for ever", "")


def test_a_key_without_one_of_its_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="must contain all arguments in their order"):
        make_schema().built("list", ("worker",), "a day")(lambda request_id: "h:list")


def test_a_script_gets_only_the_names_that_it_uses() -> None:
    body = "-- KEYS: STREAM\n-- ARGV: count, ids[]\nreturn {STREAM, COUNTS, member_key(count, WORD)}"
    lines = compose("x", body, make_schema()).text.removesuffix(body).splitlines()
    assert lines == [
        "local STREAM = KEYS[1]",
        "local count = ARGV[1]",
        "local ids = {}",
        "for i = 2, #ARGV, 1 do ids[#ids + 1] = ARGV[i] end",
        "local COUNTS = 'h:counts'",
        "local function member_key(list_name, tenant) return 'h:of:' .. list_name .. '\\006' .. tenant .. ':x' end",
        "local WORD = 'it\\039s'",
    ]


def test_a_script_of_a_queue_gets_the_keys_of_that_queue() -> None:
    schema = make_schema()

    @schema.built("hash", ("worker",), "a day")
    def bodies_key(queue: str) -> str:
        """Bodies."""
        return f"h:body:{queue}:x"

    body = "-- KEYS: QUEUE, STREAM[]\n-- RIGHTS: BODIES\nredis.call('HGET', BODIES, STREAM[1])"
    script = compose("x", body, schema)
    assert "local BODIES = 'h:body:' .. QUEUE .. ':x'" in script.text.splitlines()
    assert "'HSET', BODIES" in script.text
    assert script.keys(queue="q", stream=["s"]) == ["q", "s"]
    with pytest.raises(ValueError, match="undeclared BODIES"):
        compose("x", "return BODIES", schema)


def test_a_script_has_only_the_functions_that_it_can_reach() -> None:
    prelude = """local function short(key) return redis.call('GET', key) end
-- Used by nothing.
local function unused(record)
  return short(record.grant)
end
local function again(n)
  if n > 0 then return again(n - 1) end
end
local first
-- Used together.
local second
do
  local function inner() return COUNTS end
  first = inner
  function second() return inner() end
end
local lonely
do
  lonely = unused
end
local function grant(id)
  return second(id)
end
"""
    text = compose("x", prelude + "-- RIGHTS: COUNTS\nreturn grant(1) or record.lonely -- again", make_schema()).text
    assert re.findall(r"^local (?:function )?(\w+)", text, re.MULTILINE) == ["COUNTS", "first", "second", "grant"]
    assert "'GET'" not in text


@pytest.mark.parametrize(
    "function",
    [
        "local function f(a)\n  return a\nend -- of f\n",
        "local function f(a)\nreturn a\nend\n",
        "local function f(a)\n  return a\n",
        "local function f(a) if a then return 1 end\n  return 2\nend\n",
        "local function f(a) return '--' .. g(a) end\n",
        "--[[ long\n]]\n",
    ],
)
def test_a_script_whose_functions_cannot_be_told_apart_does_not_load(function: str) -> None:
    with pytest.raises(ValueError, match="script x: "):
        compose("x", function + "local function g(a)\n  return a\nend\nreturn 1", make_schema())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("-- KEYS: STREAM, STREAM\n", "KEYS must be distinct names"),
        ("-- KEYS: STREAM\n-- KEYS: STREAM\n", "KEYS must be distinct names"),
        ("-- ARGV: count, count[]\n", "ARGV must be distinct names"),
        ("-- KEYS: MEMBER[], STREAM\n", "arrays last"),
        ("-- KEYS: the stream\n", "KEYS must be distinct names"),
        ("-- KEYS: STREEM\n", "unknown key STREEM"),
        ("-- KEYS: COUNTS\n", "unknown key COUNTS"),
        ("-- KEYS: MEMBER\nreturn STREAM", "undeclared STREAM"),
        ("return KEYS[1]", "KEYS by position"),
        ("return ARGV[1]", "ARGV by position"),
    ],
)
def test_a_script_with_a_wrong_name_does_not_load(body: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"script x: .*{problem}"):
        compose("x", body, make_schema())


def test_keys_are_passed_by_name_and_sent_in_their_order() -> None:
    one = compose("x", "-- KEYS: MEMBER, STREAM\n", make_schema())
    assert one.keys(stream="s", member="m") == ["m", "s"]
    many = compose("x", "-- KEYS: KEY, MEMBER[], STREAM[]\n", make_schema())
    assert many.keys(stream=["s1", "s2"], member=["m1", "m2"], key="k") == ["k", "m1", "s1", "m2", "s2"]
    with pytest.raises(TypeError, match="the script's keys are member, stream, not member"):
        one.keys(member="m")
    with pytest.raises(TypeError, match="not member, stream, other"):
        one.keys(member="m", stream="s", other="o")


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__"):
                yield importlib.import_module(found.name)


def callables(module: ModuleType, tree: ast.AST) -> dict[str, LuaScript]:
    """What a module calls with the keys of a script, as it is written there."""
    scripts = {name: value for name, value in vars(module).items() if isinstance(value, LuaScript)}
    found = {f"{name}.{method}": script for name, script in scripts.items() for method in ("keys", "read")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            bound, target = (
                ast.unparse(node.value.func),
                node.target if isinstance(node, ast.AnnAssign) else node.targets[0],
            )
            if bound.endswith(".bound") and bound.removesuffix(".bound") in scripts:
                found[ast.unparse(target)] = scripts[bound.removesuffix(".bound")]
    return found | {f"self._run[{name!r}]": script for name, script in getattr(module, "SCRIPTS", {}).items()}


def test_every_function_that_a_script_calls_is_in_it() -> None:
    values = [value for module in modules() for value in vars(module).values()]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    scripts = [value for value in values if isinstance(value, LuaScript)]
    assert {lease.text for lease in SCRIPTS.values()} <= {script.text for script in scripts}
    for script in scripts:
        code = re.sub(r"'[^'\n]*'", "''", re.sub("--.*", "", script.text))
        called = set(re.findall(r"(?<![\w.:])(\w+)\(", code))
        defined = {*re.findall(r"function (\w+)", code), *re.findall(r"function \w*\(([^)]*)\)", code)}
        defined |= {name for names in re.findall(r"local ([\w, ]+)", code) for name in names.split(", ")}
        assert called - defined <= LUA_FUNCTIONS | {"function", "if", "and", "or", "not", "in", "return", "while"}


def test_every_call_passes_the_keys_that_its_script_declares() -> None:
    checked = 0
    for module in modules():
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        known = callables(module, tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            script = known.get(ast.unparse(call.func))
            if script is not None:
                given = {keyword.arg for keyword in call.keywords}
                assert given == {*script.names, *script.repeated}, f"{module}: {ast.unparse(call)}"
                checked += 1
    assert checked > 30


def test_scripts_called_with_the_same_keys_declare_the_same_keys() -> None:
    names = ("ADD", "TAKE", "RENEW", "RELEASE_ALL", "RELEASE")
    assert len({getattr(claims, f"_{name}").names for name in names}) == 1


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_scripts_check_for_the_declared_type(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name, kind in re.findall(r"problem_of\((\w+?)(?:_key\([^']*\))?, '(\w+)'\)", text):
        if name.lower() in KEYS:
            assert KEYS[name.lower()].type == kind, name


def test_key_names_are_written_only_where_they_are_declared() -> None:
    written = [path for path in LUA if re.search(r"'(?:headrace|celery-task)", path.read_text(encoding="utf-8"))]
    for package in (*PACKAGES, headrace_workers):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            if any(isinstance(text, str) and re.match(r"headrace:\S|celery-task-meta", text) for text in texts):
                written.append(path)
    assert [path.name for path in written] == ["keys.py", "keys.py"]


def test_the_keys_of_a_queue_have_their_declared_types() -> None:
    types = queue_key_types("headrace.m")
    assert (
        types["headrace.m"] == types["headrace:dead:headrace.m"] == types["headrace:queue:wake-up:headrace.m"] == "list"
    )
    assert types["headrace:lease:body:headrace.m"] == types["headrace:share:clock:headrace.m"] == "hash"
    assert types["headrace:share:mean:headrace.m"] == "string"
    assert types["headrace:queue:ids:headrace.m\x06\x169"] == types["headrace:lease:leases:headrace.m"] == "zset"
    assert len(types) == 9 + 9 + 4 * 6 + 4


def test_durations_are_shown_in_the_largest_whole_unit() -> None:
    assert [span(seconds) for seconds in (10, 60, 3600, 86_400, 90_000, 38 * 86_400)] == [
        *("10 s", "1 minute", "1 hour", "1 day", "25 hours", "38 days")
    ]
