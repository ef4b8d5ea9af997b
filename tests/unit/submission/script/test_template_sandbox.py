"""Templates of users are checked, and their mistakes named with file and line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.script import template_sandbox
from hpc_ddp.submission.script.render import Rendering

DOCS = Path(__file__).parents[4] / "docs"
EXTENDS = "{% extends 'job.sbatch.j2' %}\n"


def _rendering(path: Path) -> Rendering:
    spec = JobSpec(script="/home/me/train.py", template=str(path), setup=("module load x",))
    return Rendering(spec, RunFolder(Path("/runs/a/b")), Path("/code"), Path(spec.script))


@pytest.mark.parametrize("part", ["text", "block"])
@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("{% block x %}\n{% if %}", 3, "Expected an expression"),
        ("{% block setup %}\n{{ no_such_name }}\n{% endblock %}", 3, "'no_such_name' is undefined"),
        ("{% block setup %}\n\n{{ 1 / 0 }}{% endblock %}", 4, "ZeroDivisionError"),
        ("{% block setup %}\n{{ run.gone }}{% endblock %}", 3, "no attribute 'gone'"),
        ("{% block setup %}\n{{ run | shout }}{% endblock %}", 3, "No filter named 'shout'"),
        ("{% block setup %}\n{{ setup | join(1, 2, 3) }}{% endblock %}", 3, "TypeError"),
        ("{% block setup %}\n{% include 'gone.j2' %}{% endblock %}", 3, "no template 'gone.j2'"),
        ("\n{% block steps %}{% endblock %}", 3, "no block 'steps'; accepted: header, "),
        ("{% block steps %}{% endblock %}", 2, "did you mean 'step'?"),
        ("{% if setup %}\n{% block nope %}{% endblock %}{% endif %}", 3, "no block 'nope'"),
        ("\n\nmodule load y\n", 4, "outside of a block"),
        ("{% set x %}module load y{% endset %}\n{{ x }}", 3, "outside of a block"),
        ("{{ run }}", 2, "outside of a block"),
        ("{% set setup = 5 %}", 0, "not iterable"),
        (
            "{% block setup %}\n{{ lipsum.__globals__.os }}{% endblock %}",
            3,
            "is unsafe: a template",
        ),
        (
            "{% block setup %}\n{{ run | attr('__class__') }}{% endblock %}",
            3,
            "'__class__' of 'str'",
        ),
        ("{% block setup %}\n{{ '{0.__class__}'.format(run) }}{% endblock %}", 3, "is unsafe"),
        ("{% block setup %}\n{{ self.__init__ }}{% endblock %}", 3, "'__init__'"),
        ("{% block setup %}\n{{ env.update(A='b') }}{% endblock %}", 3, "'update' of 'dict'"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(
    text: str, line: int, message: str, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.j2"
    path.write_text(EXTENDS + text)
    with pytest.raises(UsageError) as caught:
        getattr(_rendering(path), part)(*(["setup"] if part == "block" else []))
    where = f"{path}, line {line}: " if line else "job.sbatch.j2, line "
    assert where in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.j2", "\n{% extends 'gone.j2' %}", "own.j2, line 2: there is no template 'gone.j2'"),
        ("own.j2", "{% extends 'own.j2' %}", "extends or includes itself without end"),
        ("own.j2", "{% extends 'two.j2' %}", "two.j2, line 2: job.sbatch.j2 has no block 'one'"),
        ("own.j2", b"\xff", "own.j2: UnicodeDecodeError"),
    ],
)
def test_a_wrong_parent_is_named(
    name: str, text: str | bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "two.j2").write_text(EXTENDS + "{% block one %}{% endblock %}")
    with pytest.raises(UsageError) as caught:
        _rendering(path).text()
    assert message in caught.value.message


def test_blocks_of_a_chain_of_templates_are_merged(tmp_path: Path) -> None:
    """A group's template has a block of its own, in ours, which a member's overrides."""
    (tmp_path / "group.j2").write_text(
        EXTENDS + "{% block setup %}{{ super() }}{% block data %}a{% endblock %}{% endblock %}"
    )
    path = tmp_path / "job.sbatch.j2"  # may be called as ours is
    path.write_text(
        "{% extends 'group.j2' %}{% set who = 'me' %}{% block data %}{{ who }}"
        "{% include 'more.sh' %}{% endblock %}"
    )
    (tmp_path / "more.sh").write_text("; more\n")
    rendering = _rendering(path)
    assert (
        "unset IFS; } 2>/dev/null  # a set-up line may have said otherwise\nme; more\n"
        in rendering.text()
    )
    assert rendering.block("setup") in rendering.text()
    assert "batch begin" in rendering.block("attempt")  # which it does not have itself
    assert template_sandbox.find_missing_words(rendering.text()) == []


def test_missing_parts_of_a_script_are_named(tmp_path: Path) -> None:
    path = tmp_path / "own.j2"
    path.write_text("#!/bin/bash\n# batch verdict\nsrun {{ python | q }} {{ script | q }}\n")
    left_out = template_sandbox.find_missing_words(_rendering(path).text())
    assert [text.split("'")[1] for text in left_out] == [
        *("HPC_DDP_RUN", "batch begin", "supervisor", "batch verdict")
    ]
    with pytest.raises(UsageError, match=r"own.j2: it has no block 'setup', and does not extend"):
        _rendering(path).block("setup")


def test_directives_that_a_header_leaves_out_are_named(tmp_path: Path) -> None:
    path = tmp_path / "own.j2"
    path.write_text(EXTENDS + "{% block header %}#!/bin/bash\n#SBATCH -p x\n{% endblock %}")
    (text,) = [text for text in _rendering(path).warnings() if "super()" in text]
    assert text.startswith("the template leaves out --job-name=")
    assert "--signal=" in text
    assert "--partition" not in text
    path.write_text(EXTENDS + "{% block header %}{{ super() }}{% endblock %}")
    assert _rendering(path).warnings() == []


def test_blocks_that_submitit_does_not_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.j2"
    path.write_text(EXTENDS + "{% block setup %}{% endblock %}\n{% block step %}{% endblock %}")
    template_sandbox.check_used(str(path), ("setup", "step"))
    with pytest.raises(UsageError, match=r"own.j2, line 3: .*'step'; accepted: setup"):
        template_sandbox.check_used(str(path), ("setup",))


@pytest.mark.parametrize("path", sorted(DOCS.glob("templates/*.j2")), ids=lambda path: path.name)
def test_the_documented_templates_render(path: Path) -> None:
    text = _rendering(path).text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert template_sandbox.find_missing_words(text) == []
    assert f"docs/templates/{path.name}" in (DOCS / "templates.md").read_text()


def test_the_page_names_all_blocks_and_variables() -> None:
    rendering = _rendering(DOCS / "templates" / "usage.j2")
    base = (folder("templates") / template_sandbox.BASE).read_text()
    names = {*re.findall(r"{% block (\w+) %}", base), *rendering._context}
    page = (DOCS / "templates.md").read_text().partition("## A template of your own")[2]
    assert names <= set(re.findall(r"`(\w+)`", page))
