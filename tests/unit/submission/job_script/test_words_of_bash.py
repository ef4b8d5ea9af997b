"""Words of a launch are those that bash makes of the same text."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.bash.counts import fill_in_parts
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import literal
from hpc_ddp.submission.job_script.importer import import_script
from hpc_ddp.submission.job_script.statements.reader import Reader

HERE = Path("/home/me/project")
PARTS = (".x", "\\$", "/", "-y.", ",z=", "'q r'", '"s t"', '"u$B"', "$B", "${B}", "$A", "\\ ",
         '" $A "', '" "', "\\\n")  # fmt: skip
SET = "A=1\nB='b c'\n"


def of_bash(script: str) -> list[str]:
    """Return the words that bash prints, each behind a NUL."""
    bash = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return bash.stdout.split("\0")[:-1]


@pytest.mark.parametrize("length", [3, pytest.param(4, marks=pytest.mark.more)])
@pytest.mark.parametrize("start", PARTS)
def test_words_are_those_of_bash(start: str, length: int) -> None:
    """All words of at most so many parts."""
    ends = ("".join(parts) for n in range(length) for parts in product(PARTS, repeat=n))
    words = " ".join(start + end for end in ends)
    result = import_script(f"#!/bin/bash\n{SET}srun python train.py {words}\n", HERE, HERE)
    assert result.settings()["args"] == of_bash(f"{SET}printf '%s\\0' {words}")


@pytest.mark.parametrize(
    "line", ["C={0}", "export C={0}", "C=({0})", "declare C={0}", "C=a; C+={0}"]
)
@pytest.mark.parametrize("word", ["x$A/b$B/c", "$A-$B.d$A,", '"$A"/$B/$A:e', '"a "\\$A" b "c'])
def test_values_are_those_of_bash(line: str, word: str) -> None:
    lines = f"{SET}{line.format(word)}\n"
    args = import_script(f'#!/bin/bash\n{lines}srun python train.py "${{C[@]}}"\n', HERE, HERE)
    assert args.settings()["args"] == of_bash(f"{lines}printf '%s\\0' \"${{C[@]}}\"")


@pytest.mark.parametrize(
    "word",
    ['"$A\\$B"', '"${A}\\$B"', '"$(echo)\\$B"', '"`echo`\\$B"', '"$((1))\\$B\\ c"', "$A\\\\b"],
)
def test_words_with_escapes_in_quotes_stay(word: str) -> None:
    lines = f"{SET}C=({word} '\\ d')\n"
    kept = "printf '%s\\0' \"${C[@]}\""
    setup = import_script(f"#!/bin/bash\n{lines}{kept}\nsrun python t.py\n", HERE, HERE).settings()[
        "setup"
    ]
    assert of_bash("\n".join(setup)) == of_bash(f"{lines}{kept}")


PATTERNS = ("*:", ":*", "(*", "\\(*", "*[!0-9]", "[^0-9]", "[[:digit:]]", "?", "a100:", "x", "*:*")
SIGNS = (("#", ""), ("##", ""), ("%", ""), ("%%", ""), ("/", ""), ("/", "/7"), ("//", "/"))
FORMS = [f"${{X{sign}{text}{end}}}" for text in PATTERNS for sign, end in SIGNS]
FORMS += ["${X: -1}", "${X:(-2):1}", "${X:0:1}", "${X:1}", "$(echo $X | cut -d: -f2)",
          '$(echo "$X" | cut -d \':\' -f 1)', "$(echo ${X} | awk -F: '{print $NF}')",
          "`echo $X | awk -F ':' '{ print $2; }'`"]  # fmt: skip


@pytest.mark.parametrize("text", ["a100:3", "gpu:a100:4", "4(x2)", "3", "a:b:c:12"])
def test_parts_of_values_are_those_of_bash(text: str) -> None:
    expected = of_bash(f"X='{text}'\n" + "".join(f"printf '%s\\0' \"{form}\"\n" for form in FORMS))
    assert [fill_in_parts(form, Scope(texts={"X": text})) for form in FORMS] == expected


@pytest.mark.parametrize(
    "script",
    [
        'echo "a: 1\nb: $B\n" > f',
        "cat > ./f <<E\na: $B\\$C \"x\" \\\\ '$B'\n  b: ${B}c \\\n d\nE",
        "cat <<'E' > $PWD/f\na: $B\nE\ncat <<-E >> f\n\tb: $((1 + 2))\nE",
        "cat <<E | tee f\na\nE\necho -n b | tee -a f > /dev/null",
        "tee f > /dev/null <<E\na\nE\necho -e 'b\\nc' >> f",
        "printf 'a: %s\\nb: %d%%\\n' \"$B\" 2 x > f",
        "printf '%s\\n' a 'b c' >f 2>/dev/null; printf x >&2",
        "{ echo a; printf b; } > f\n( echo c ) >> f",
        "mkdir -p x && cat > x/f <<E\na\nE\nchmod 700 x/f",
        "cat <<< a$B > f",
        "rm -f g; echo a >> f; echo b >> g; : > h; rm f",
        "w() {\n cat > $1 <<E\na: $2\nE\n}\nw f 'x y'",
        "echo a > f; sed -i s/a/b/ f",
        "echo a > f; date >> f",
        "[ -e f ] || echo a > f",
        "if [ -e f ]; then echo a; fi > f",
        "for n in 1 2; do echo $n >> f; done",
        "mkdir d; (cd d && echo a > f)",
        "mkdir d; { cd d; echo a > f; cd ..; echo b > g; }",
        "mkdir d; (cd d; echo a > f; cd $(pwd); cd ..; echo b > f)",
        "mkdir d; echo a > d/f; (cd d; rm f; echo c > f)",
        "echo a > f; mkdir d; (cd d && echo b > f; echo c > ../g)",
        "echo a > f.yml; sed -i s/a/b/ *.yml",
        "echo a > f.yml; F=$(echo f.yml); sed -i s/a/b/ $F",
        "F=.; echo a > f.yml; sed -i s/a/b/ $F/*.yml",
        "mkdir d; echo a > d/f; rm -rf d; mkdir d; echo b >> d/f",
        "echo a > f; rm -f f; echo b >> f",
        "echo a > f.yml; echo b > g; rm -f *.yml; echo c >> f.yml",
        "mkdir d e; echo a > d/f; echo b > e/f; cp e/f d",
        "mkdir d e; echo a > d/f; mv d e",
        "echo a > f; mkdir d; [ -e f ] && cd d; sed -i s/a/b/ ../f",
        "echo a > f; (cd $(echo .) && sed -i s/a/b/ f)",
        "mkdir -p d; cd d; echo a > f; cd $(echo ..); cd $(echo .); echo b > f",
        "echo a > f; python3 -c 'import sys; open(sys.argv[1][6:], \"w\")' --out=f; date > g",
        "grep -q y /dev/null && echo b > f; :",
        "echo a > f && false && echo b > f; :",
        "mkdir -p d && echo a > f && echo b >> f",
    ],
)
def test_texts_of_files_are_those_of_bash(script: str, tmp_path: Path) -> None:
    """Or not known."""
    reader = Reader(Scope({"PWD": literal(str(tmp_path))}))
    reader.read(f"B='b c'\n{script}\n")
    subprocess.run(["bash", "-c", f"B='b c'\n{script}"], cwd=tmp_path, check=True)
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    written = {path: text for path, text in reader.files.items() if path[0] == "/" and text}
    is_known = not any(
        sign in script for sign in ("sed", "date", "[", "for", "$(", "grep", "false", "mv", "cp")
    )
    texts = {str(path): path.read_text() for path in paths if path.stat().st_size}
    assert written.items() <= texts.items()
    assert written == texts or not is_known


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (("cd $A", "echo a > f", "cd $B"), {}),
        (("cd $A", "echo a > f", "(cd sub && echo b > f)"), {"f": "a\n", "sub/f": "b\n"}),
        (("cd $A", "echo a > f", "(cd $B && sed -i s/a/b/ f)"), {}),
        (("echo a > /d/f", "cd $A", "sed -i s/a/b/ f"), {}),
        (("echo a > /d/f", "cd $A", "echo b > f"), {"f": "b\n"}),
        (("echo a > $D/f", "sed -i s/a/b/ $D/*"), {}),
        (("echo a > $D/f", "rm -rf $D", "echo b >> $D/f"), {"/w/$D/f": "b\n"}),
        (("echo a > f", "rm -rf $D"), {"/w/f": "a\n"}),
        (("echo a > $D/f", "sed -i s/a/b/ ${D}/f"), {}),
        (("echo a > f", "python3 prepare.py $X --all"), {"/w/f": "a\n"}),
        (("echo a > f", "cp -r . /tmp/copy"), {"/w/f": "a\n"}),
    ],
)
def test_texts_in_folders_that_are_not_known(lines: tuple[str, ...], texts: dict[str, str]) -> None:
    reader = Reader(Scope({"PWD": literal("/w")}))
    reader.read("\n".join((*lines, "true")))
    assert reader.files == texts
