import contextlib
import io

import pytest

from qcollect.cli import console


@pytest.fixture
def shown(capsys):
    def of(show, *args):
        show(*args)
        return capsys.readouterr().err

    return of


@pytest.mark.parametrize("text", ["run[red]x", "a [/x/y] b", "[/bold] [1, 2]", "w[0] :smile: 'quoted' https://x"])
def test_messages_are_shown_as_they_are(shown, text):
    assert shown(console.note, text) == f"{text}\n"
    assert shown(console.warn, text) == f"warning: {text}\n"
    assert shown(console.fail, text, 3) == f"error: {text}\n"


def test_a_message_is_never_wrapped(shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert shown(console.note, "word " * 50 + "/a/" * 100) == "word " * 50 + "/a/" * 100 + "\n"


def test_control_characters_of_a_message_are_escaped_and_its_lines_kept(shown):
    assert shown(console.fail, "one\x1b[31mtwo\nthree\x07\tfour\u202e", 3) == (
        "error: one\\x1b[31mtwo\nthree\\x07 four\\u202e\n"
    )


def test_an_error_carries_its_exit_code(shown):
    assert console.fail("text", 4).exit_code == 4


def test_a_table_off_a_terminal_is_as_wide_as_it_needs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    table = console.make_table("name", "text")
    table.add_row("a", "word " * 30)
    table.add_row("long-name", "[red]")
    assert console.fits(table)
    console.print_table(table)
    assert capsys.readouterr().out == f"name       text\na          {'word ' * 29}word\nlong-name  [red]\n"


def test_json_holds_no_nan():
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"loss": float("nan")})
