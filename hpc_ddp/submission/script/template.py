"""The batch script's template, the user's blocks over it, and the faults of those blocks."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.core.job.variables import shell_word
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings import trust

T = TypeVar("T")

BASE = "job.sbatch.j2"
# Words that the script of a job needs, and the consequence where one is left out.
NEEDED = {
    "HPC_DDP_RUN=": "the job does not know its run folder",
    "batch begin": "no attempt begins, so `status` and `logs` know nothing of the job",
    "supervisor|task|submitit": "the workers get no notice, and have no logs",
    "batch verdict": "nothing requeues the job, nor records its end",
}


def whole(user_template: str | None, values: Mapping[str, Any]) -> str:
    """Return the text of the batch script.

    Parameters
    ----------
    user_template
        the path of the user's template, which extends ours; None: ours alone
    values
        the template's variables, by name

    Raises
    ------
    UsageError
        the user's template is missing, broken, or may not act for the user; names file and line
    """
    loaded = _load(user_template)
    context = loaded.new_context({**values})
    return _guarded(lambda: "".join(loaded.root_render_func(context)), user_template)


def block(name: str, user_template: str | None, values: Mapping[str, Any]) -> str:
    """Return the text of the script's block `name`. The other arguments are those of `whole`. Raise
    UsageError where `whole` does, and for a block that the template does not have."""
    loaded = _load(user_template)
    context = loaded.new_context({**values})

    def text() -> str:
        """Return the block's text; raise UsageError where the template has none of that name."""
        "".join(loaded.root_render_func(context))  # only then are the parents' blocks known
        if name not in context.blocks:
            raise _broken(
                user_template, None, f"it has no block {name!r}, and does not extend {BASE}"
            )
        return "".join(context.blocks[name][0](context))

    return _guarded(text, user_template)


def _load(user_template: str | None) -> jinja2.Template:
    """Return the template of a job: the user's, after a check of its blocks, or ours (None). Raise
    UsageError for a template that is missing or broken, or may not act for the user."""
    path = _normal(user_template) if user_template else None
    if path and not path.is_file():
        raise UsageError(f"template {str(path)!r} does not exist", hint="--template FILE")
    environment = _environment(path.parent if path else None)

    def checked() -> jinja2.Template:
        """Return the template, after a check of a user's. Raise UsageError or jinja's errors."""
        if path:
            _check(environment, str(path))
        return environment.get_template(str(path) if path else BASE)

    return _guarded(checked, user_template)


def _guarded(use_template: Callable[[], T], user_template: str | None) -> T:
    """Return the result of `use_template`, which loads or renders a template.

    Turn any exception of it into a UsageError, with file and line where they are known. Without
    a user's template the fault is ours, and the exception is raised as it is.
    """
    try:
        return use_template()
    except UsageError:
        raise
    except Exception as error:  # a template can do anything
        if user_template is None:
            raise  # a mistake of ours
        origin = _place(error.__traceback__)
        if isinstance(error, jinja2.TemplateSyntaxError):
            origin = error.filename, error.lineno
        file, line = origin
        raise _broken(file or user_template, line, _message(error)) from None


def _message(error: Exception) -> str:
    """Return in words what is wrong with a template. `error` is the exception of jinja, or of the
    template's own code."""
    if isinstance(error, jinja2.TemplateNotFound):
        return f"there is no template {error.name!r}; accepted: {BASE!r}, or a file beside this one"
    if isinstance(error, RecursionError):
        return "it extends or includes itself without end"
    if isinstance(error, SecurityError):
        return (
            f"{str(error.message).rstrip('.')}: a template only reads the values that it is given"
        )
    if isinstance(error, jinja2.TemplateError):
        return str(error.message)
    return f"{type(error).__name__}: {error}"


def _broken(file: str | None, line: int | None, why: str) -> UsageError:
    """Return the UsageError for a broken template; the message has the file, the line (unless that
    is None) and `why`."""
    where = f"{file}, line {line}" if line else str(file)
    return UsageError(
        f"the template is broken: {where}: {why}",
        hint=f"blocks and variables: docs/templates.md, {folder('templates') / BASE}",
    )


def _normal(user_template: str) -> Path:
    """Return the absolute path of a user's template, without ``..``; links are kept."""
    return Path(os.path.normpath(Path(user_template).absolute()))


def _place(trace: TracebackType | None) -> tuple[str | None, int | None]:
    """Return file and line of the innermost template in the traceback of an exception; (None, None)
    where no template is in it."""
    file, line = None, None
    while trace:
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            file, line = template.filename, template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return file, line


def check_used(user_template: str | None, used: Collection[str]) -> None:
    """Refuse a template that overrides a block of ours which the submitit back-end does not use.
    `used` are the names of the blocks that it uses. No template (None) is accepted.

    Raises
    ------
    UsageError
        a block is not used (names the block, its line, and the `used` ones); or a file may not act
        for the user
    jinja2.TemplateError, OSError, ValueError, RecursionError
        a template is missing, broken, can't be read, or extends itself; `whole` refuses it in words
    """
    if user_template is None:
        return
    path = _normal(user_template)
    environment = _environment(path.parent)
    base = _blocks(environment, BASE)
    for name, file, tree in _chain(environment, str(path)):
        for block in tree.find_all(nodes.Block):
            if name != BASE and block.name in base and block.name not in used:
                raise UsageError(
                    f"{file}, line {block.lineno}: the submitit back-end does not use the block"
                    f" {block.name!r}; accepted: {', '.join(used)}",
                    hint="--backend slurm",
                )


def missing(script: str) -> list[str]:
    """Return a sentence for each word of `NEEDED` that a rendered script lacks outside of comments,
    with the consequence; [] for a script that has all."""
    return [
        f"the template leaves out {word.strip('=').split('|')[0]!r}: {consequence}"
        for word, consequence in NEEDED.items()
        if not re.search(rf"(?m)^(?!\s*#).*\b({word})", script)
    ]


def _check(environment: jinja2.Environment, name: str) -> None:
    """Raise UsageError, with file and line, for what jinja would pass over in silence: an unknown
    block, and text outside of a block.

    `name` is a template's name or path. The templates that it extends are checked, too, up to ours.
    A template passes that extends none, or one whose name is computed or unknown. Raises further
    what `_source` raises, and jinja's errors for a broken template.
    """
    text, file = _source(environment, name)
    tree = environment.parse(text, name, file)
    parent = _constant(tree.find(nodes.Extends))
    if parent is None:
        return
    try:
        if parent != BASE:
            _check(environment, parent)
        accepted = _blocks(environment, parent)
    except jinja2.TemplateNotFound:
        return  # its rendering raises this, with the line
    for node in _outside_of_blocks(tree.body):
        if isinstance(node, nodes.Block) and node.name not in accepted:
            names = ", ".join(accepted)
            raise _broken(
                file,
                node.lineno,
                f"{parent} has no block {node.name!r}; accepted: {names}"
                + closest(node.name, accepted),
            )
        if isinstance(node, nodes.Output) and (line := _first_line(node)):
            raise _broken(
                file, line, "this stands outside of a block, and would be left out of the script"
            )


def _outside_of_blocks(body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """Yield each node of a template whose output would be left out, as it is in no block: also
    those in an ``if``, ``for`` or ``with``. A block, a macro, a ``call`` and a ``set`` are yielded
    without their content."""
    closed = (nodes.Block, nodes.Output, nodes.Macro, nodes.CallBlock, nodes.AssignBlock)
    for node in body:
        yield node
        if not isinstance(node, closed):
            yield from _outside_of_blocks(node.iter_child_nodes())


def _first_line(output: nodes.Output) -> int | None:
    """Return the line of the first word or expression in a text of a template; None where the text
    is blank."""
    for part in output.nodes:
        if not isinstance(part, nodes.TemplateData):
            return part.lineno
        if part.data.strip():
            blank = part.data[: len(part.data) - len(part.data.lstrip())]
            return part.lineno + blank.count("\n")
    return None


def _blocks(environment: jinja2.Environment, name: str) -> list[str]:
    """Return the names of the blocks of a template and of those that it extends, each once; those
    of the last template that is extended come first. Raise RecursionError for one that extends
    itself, jinja's errors, and what `_source` raises."""
    trees = [tree for _, _, tree in _chain(environment, name)]
    names = (block.name for tree in reversed(trees) for block in tree.find_all(nodes.Block))
    return list(dict.fromkeys(names))


def _chain(
    environment: jinja2.Environment, name: str
) -> Iterator[tuple[str, str | None, nodes.Template]]:
    """Yield name, file and content of a template, then of each that it extends. Raise
    RecursionError for one that extends itself, and jinja's errors; further what `_source`
    raises."""
    text, file = _source(environment, name)
    tree = environment.parse(text, name, file)
    yield name, file, tree
    if parent := _constant(tree.find(nodes.Extends)):
        yield from _chain(environment, parent)


def _constant(extends: nodes.Extends | None) -> str | None:
    """Return the name of the template that is extended; None where none is extended, or where the
    name is computed."""
    if extends is None or not isinstance(extends.template, nodes.Const):
        return None
    return str(extends.template.value)


def _source(environment: jinja2.Environment, name: str) -> tuple[str, str | None]:
    """Return a template's text, and its file. Raise TemplateNotFound; UsageError for a file that
    may not act for the user; OSError or ValueError for a file that can't be read."""
    assert environment.loader
    text, file, _ = environment.loader.get_source(environment, name)
    return text, file


class _TrustedLoader(jinja2.FileSystemLoader):
    """Loads the user's templates: the named one, and all that it extends and includes."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        """Return a template's text, its file, and a function that says whether the text is still
        current. Raise TemplateNotFound; UsageError for a file that may not act for the user;
        OSError or ValueError for a file that can't be read."""
        _, file, is_current = super().get_source(environment, template)
        return trust.read(Path(file)).decode(), file, is_current


@cache  # keeps compiled templates: a job is rendered once to check it, and once to run it
def _environment(beside: Path | None) -> jinja2.Environment:
    """Return jinja's environment for the user's templates in the folder `beside`, or for ours alone
    (None). The same folder gets the same environment.

    Our template is found first under its name: a user's template that extends ours may have the
    same name.
    """
    loaders: list[jinja2.BaseLoader] = [jinja2.FileSystemLoader(folder("templates"))]
    if beside:  # for what a user's template includes, and for itself by its whole path
        loaders.append(_TrustedLoader([beside, "/"]))
    # A second wall behind `trust`: at its rendering a template can run nothing.
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.ChoiceLoader(loaders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # no autoescape: this is no HTML; every value goes through `q` or `in_double_quotes`
    environment.filters["q"] = quoted
    environment.filters["in_double_quotes"] = in_double_quotes
    return environment


def quoted(value: object, expand: Sequence[str] = ()) -> str:
    """Return a value as one word for the shell, quoted where needed. The shell fills in the
    variables of `expand`."""
    return shell_word(str(value), expand)


def in_double_quotes(word: str) -> str:
    """Return a word of ours with double quotes, ``--x="$Y"``, so that the shell fills in its
    variables. A word without a ``$`` behind a ``=`` stays as it is."""
    name, _, value = word.partition("=")
    return f'{name}="{value}"' if "$" in value else word
