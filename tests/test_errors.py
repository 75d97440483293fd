"""What becomes of foreign text in lines that people read."""

import pytest

from mmrl.cli.main import main
from mmrl.errors import describe_error, printable
from mmrl.runtime.progress import display
from tests.report.made import healthy, write_run

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_a_terminal_gets_no_escapes_of_others(capsys):
    try:
        raise ValueError(f"the response was {ESCAPE}")
    except ValueError as error:
        line = describe_error(error)
    assert line.startswith("ValueError: the response was \\x1b]0;owned\\x07\\x1b[2J (test_errors.py:")
    display.line(f"step 1: {ESCAPE}")
    assert capsys.readouterr().out == "step 1: \\x1b]0;owned\\x07\\x1b[2J\n"


def test_a_run_of_somebody_else_sends_no_escapes_to_the_terminal(tmp_path, capsys):
    run = write_run(tmp_path / "run", healthy(3), end=("failed", f"It ended with {ESCAPE}"))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[0] == "It ended with \\x1b]0;owned\\x07\\x1b[2J"


@pytest.mark.parametrize("text", ["a\tb\nc", "\u56fe\u50cf \xe9 \u2192", "[bold]x[/bold]"])
def test_text_stays_text(text):
    assert printable(text) == text


def test_carriage_returns_and_controls_of_eight_bits_are_written_out():
    assert printable("a\rb\x9b2Jc\x7f") == "a\\x0db\\x9b2Jc\\x7f"
