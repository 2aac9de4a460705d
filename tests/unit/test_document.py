import pytest

from qcollect.document import parse_yaml


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-2", -2),
        ("012", 12),
        ("08", 8),
        ("0x10", 16),
        ("0o17", 15),
        ("128_256", 128256),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("none", "none"),
        ("1:30", "1:30"),
        ("2024-12-01", "2024-12-01"),
        (".nan", ".nan"),
        (".inf", ".inf"),
        ("0-3", "0-3"),
        ("every:2", "every:2"),
        ("0,2,4", "0,2,4"),
        ("'1e-5'", "1e-5"),
        ('"true"', "true"),
        ("$RECIPE_DIR/a", "$RECIPE_DIR/a"),
        ("!!str 12", "12"),
        ("[1, 1e1, a]", [1, 10.0, "a"]),
    ],
)
def test_scalar_is_what_was_written(text: str, expected: object) -> None:
    document = parse_yaml(f"key: {text}\n")
    assert document.problems == ()
    assert document.value == {"key": expected}
    assert type(document.value["key"]) is type(expected)


def test_keys_are_text_whatever_they_look_like() -> None:
    assert parse_yaml("on: 1\n1: 2\nnull: 3\n<<: 4\n").value == {"on": 1, "1": 2, "null": 3, "<<": 4}


def test_every_key_and_item_has_its_line() -> None:
    lines = parse_yaml("# comment\na:\n  b: 1\n\n  c:\n    - x\n    - y\nd: {e: 1,\n  f: 2}\n").lines
    assert lines == {
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c"): 5,
        ("a", "c", 0): 6,
        ("a", "c", 1): 7,
        ("d",): 8,
        ("d", "e"): 8,
        ("d", "f"): 9,
    }


def test_duplicate_key_is_a_problem_with_both_lines_and_the_last_value_stands() -> None:
    document = parse_yaml("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert document.problems == ((4, "duplicate key 'a.b', first on line 2"),)
    assert document.value == {"a": {"b": 3, "c": 2}}


def test_alias_is_the_value_again_and_no_duplicate() -> None:
    document = parse_yaml("a: &x {b: [1, 2]}\nc: *x\n")
    assert document.problems == ()
    assert document.value == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: c: d\n", 2, "not valid YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML: found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML: but found another document"),
        ("a: 1\nb: \x07\n", 2, "not valid YAML: the character '\\x07' is not allowed"),
        ("a: &x [*x]\n", 1, "a.0 holds itself (an alias to a value it is part of)"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "the tag '!!python/object/apply:os.system' is not allowed"),
        ("a: !mine x\n", 1, "the tag '!mine' is not allowed; write the plain value"),
        ("a: !!set {x}\n", 1, "the tag '!!set' is not allowed"),
        ("a: 1\nb: 1e999\n", 2, "1e999 is not a finite float"),
        ("a: !!bool 3\n", 1, "3 is not a finite bool"),
        ("? [a]\n: 1\n", 1, "a key must be text, not a list or a mapping"),
        ("a: " + "[" * 5000, 1, "nested too deeply"),
        (
            "modules: [*.q_proj]\n",
            1,
            "not valid YAML: expected alphabetic or numeric character, but found '.'; "
            "quote a value that begins with '*', like '*.q_proj'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, message: str) -> None:
    problem = parse_yaml(text).problems[0]
    assert problem.line == line
    assert problem.message.startswith(message)


def test_number_with_too_many_digits_is_a_problem() -> None:
    assert "is not a finite int" in parse_yaml("a: " + "9" * 5000).problems[0].message
