"""Lines that bash can't read are refused before the job waits in the queue."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission.script.shell_lines import KEYS, check_shell_lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("module load 'x", "unexpected EOF while looking for matching"),
        ("cat <<EOF", "here-document"),
        ("if true", "unexpected end of file"),
        ("echo )", "unexpected token"),
        ("export A=1 \\", "it ends in a backslash"),
        ("echo 'it' \\\\\\", "it ends in a backslash"),
    ],
)
@pytest.mark.parametrize("key", KEYS)
def test_lines_that_bash_can_not_read_are_refused(key: str, line: str, reason: str) -> None:
    if key == "teardown" and reason in ("here-document", "it ends in a backslash"):
        return
    spec = JobSpec("t.py", **{key.replace("-", "_"): ("true", line)})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"^{key}: bash can't read it: line .*{reason}") as caught:
        check_shell_lines(spec)
    assert caught.value.hint == "look for a missing quote or bracket in its 2 line(s)"


def test_lines_that_bash_can_read_together_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("if true; then", "echo hi", "fi", "shopt -s extglob", "echo !(a|b)", "no-such-program")
    check_shell_lines(JobSpec("t.py", setup=(*lines, "cat <<EOF\nhi\nEOF")))
    check_shell_lines(JobSpec("t.py", setup=("A=1 \\", "B=2", "echo \\\\", "true # \\")))
    check_shell_lines(JobSpec("t.py", setup=(r"echo 1 \\",)))
    check_shell_lines(JobSpec("t.py", setup=("true # \\",)))
    check_shell_lines(JobSpec("t.py", teardown=("cat <<EOF", "hi")))  # bash reads it to its end
    monkeypatch.setenv("PATH", "/nowhere")
    check_shell_lines(JobSpec("t.py", setup=("'",)))


def test_a_line_that_begins_with_a_dash_is_no_option_of_bash() -> None:
    for line in ("--override a=1", "-x"):
        check_shell_lines(JobSpec("t.py", teardown=(line,)))
