"""The grammar of actions at a desktop, and that a policy's text never becomes more of a program than one known call."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.envs.desktop.actions import NoAction, read
from jaxagent.envs.desktop.screen import Row

ROWS = [Row(10, 20, "push-button"), Row(300, 40, "text")]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("click 1", "pyautogui.click(x=300, y=40)"),
        ("click 120 300", "pyautogui.click(x=120, y=300)"),
        ("click 120, 300", "pyautogui.click(x=120, y=300)"),
        ("  double_click 0\n", "pyautogui.doubleClick(x=10, y=20)"),
        ("triple_click 0", "pyautogui.tripleClick(x=10, y=20)"),
        ("right_click 0", "pyautogui.rightClick(x=10, y=20)"),
        ("move 5 6", "pyautogui.moveTo(x=5, y=6)"),
        ("drag 0 1", "pyautogui.moveTo(x=10, y=20); pyautogui.dragTo(300, 40, 0.5, button='left')"),
        ("drag 1 2 3 4", "pyautogui.moveTo(x=1, y=2); pyautogui.dragTo(3, 4, 0.5, button='left')"),
        ("scroll -3", "pyautogui.scroll(-3)"),
        ("scroll 3 1", "pyautogui.scroll(3, 300, 40)"),
        ("type a 'b'\\", r"""pyautogui.typewrite("a 'b'\\", interval=0.01)"""),
        ("type two\nlines", r"pyautogui.typewrite('two\nlines', interval=0.01)"),
        ("press Enter", "pyautogui.press('enter')"),
        ("press ctrl+shift+t", "pyautogui.hotkey('ctrl', 'shift', 't')"),
        ("press +", "pyautogui.press('+')"),
        ("wait", ""),
        ("done", ""),
        ("fail", ""),
    ],
)
def test_an_action_is_these_calls(text: str, calls: str) -> None:
    assert read(text, ROWS).calls == calls


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no action ''"),
        ("hello", "no action 'hello'"),
        ("click", "click takes whole numbers"),
        ("click 2", "there is no row 2; there are 2"),
        ("click -1", "there is no row -1"),
        ("click 1 2 3", "a row or a point"),
        ("click -5 5", "a row or a point"),
        ("click os.system", "whole numbers"),
        ("click 1e3", "whole numbers"),
        ("drag 1", "two rows or two points"),
        ("scroll 0", "clicks of the wheel"),
        ("scroll 51", "clicks of the wheel"),
        ("type", "1 to 1000 letters"),
        ("type " + "x" * 1001, "1 to 1000 letters"),
        ("type caf\u00e9", "only ASCII"),
        ("type a\x00b", "only ASCII"),
        ("press", "no key"),
        ("press ctrl+alt+shift+a+b", "no key"),
        ("press ');os.system('x", "no key"),
        ("done now", "stands alone"),
        ("pyautogui.click(1, 2)", "no action"),
    ],
)
def test_what_is_no_action_is_told_and_does_nothing(text: str, why: str) -> None:
    with pytest.raises(NoAction, match=why):
        read(text, ROWS)


HOSTILE = st.text(alphabet="'\"\\);\n{}#x1 +\u2028\ud800", max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(lambda name, rest: f"{name} {rest}", st.sampled_from(["type", "press", "click", "drag", "scroll", ""]), HOSTILE)
)
def test_whatever_is_written_the_guest_is_given_known_calls_with_literals(text: str) -> None:
    try:
        action = read(text, ROWS)
    except NoAction:
        return
    for statement in ast.parse(action.calls).body:
        assert isinstance(statement, ast.Expr)
        call = statement.value
        assert isinstance(call, ast.Call)
        assert ast.unparse(call.func).startswith("pyautogui.")
        values = [ast.literal_eval(one) for one in (*call.args, *(word.value for word in call.keywords))]
        if action.name == "type":
            assert values[0] == text.strip().partition(" ")[2]


def test_the_program_for_the_guest_is_python_and_sets_what_pyautogui_gets_wrong() -> None:
    python, flag, source = read("type <", ROWS).command
    assert (python, flag) == ("python", "-c")
    assert source.endswith("pyautogui.typewrite('<', interval=0.01)")
    shifted = next(
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
    )
    needs = eval(compile(ast.Expression(shifted), "", "eval"))  # noqa: S307 - our own lambda
    assert [letter for letter in "aA<>1!" if needs(letter)] == ["A", ">", "!"]
