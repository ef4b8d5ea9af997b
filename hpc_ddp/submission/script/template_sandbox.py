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


def render(user_template: str | None, values: Mapping[str, Any]) -> str:
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
        the user's template is missing, broken (the message has file and line), or may not act for
        the user
    """
    template = _load_template(user_template)
    context = template.new_context({**values})
    return _call_guarded(lambda: "".join(template.root_render_func(context)), user_template)


def render_block(name: str, user_template: str | None, values: Mapping[str, Any]) -> str:
    """Return the text of the script's block `name`. The other arguments are those of `render`.
    Raise UsageError where `render` does, and for a block that the template does not have."""
    template = _load_template(user_template)
    context = template.new_context({**values})

    def block_text() -> str:
        """Return the block's text; raise UsageError where the template has no block of the name."""
        # Called for its effect: only a rendering adds the parents' blocks to the context.
        "".join(template.root_render_func(context))
        if name not in context.blocks:
            raise _template_error(
                user_template, None, f"it has no block {name!r}, and does not extend {BASE}"
            )
        return "".join(context.blocks[name][0](context))  # the first overrides the others

    return _call_guarded(block_text, user_template)


def _load_template(user_template: str | None) -> jinja2.Template:
    """Return the template of a job: the user's, after a check of its blocks, or ours (None). Raise
    UsageError for a template that is missing or broken, or may not act for the user."""
    path = _normal_path(user_template) if user_template else None
    if path and not path.is_file():
        raise UsageError(f"template {str(path)!r} does not exist", hint="--template FILE")
    environment = _make_environment(path.parent if path else None)

    def load_and_check() -> jinja2.Template:
        """Return the template, after a check of a user's. Raise UsageError or jinja's errors."""
        if path:
            _check_blocks(environment, str(path))
        return environment.get_template(str(path) if path else BASE)

    return _call_guarded(load_and_check, user_template)


def _call_guarded(use_template: Callable[[], T], user_template: str | None) -> T:
    """Return the result of `use_template`, which loads or renders a template.

    For a user's template any exception of the call becomes a UsageError, with file and line where
    they are known. Without one (None) the fault is ours, and the exception is raised as it is.
    """
    try:
        return use_template()
    except UsageError:
        raise
    except Exception as error:  # a template can do anything
        if user_template is None:
            raise
        file, line = _innermost_line(error.__traceback__)
        if isinstance(error, jinja2.TemplateSyntaxError):
            file, line = error.filename, error.lineno
        raise _template_error(file or user_template, line, _fault_text(error)) from None


def _fault_text(error: Exception) -> str:
    """Return the text for the fault of a template. `error` is the exception of jinja, or of the
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


def _template_error(file: str | None, line: int | None, fault: str) -> UsageError:
    """Return the UsageError for a broken template; the message has the file, the line (unless that
    is None) and the fault."""
    place = f"{file}, line {line}" if line else str(file)
    return UsageError(
        f"the template is broken: {place}: {fault}",
        hint=f"blocks and variables: docs/templates.md, {folder('templates') / BASE}",
    )


def _normal_path(user_template: str) -> Path:
    """Return the absolute path of a user's template, without ``..``; links are kept."""
    return Path(os.path.normpath(Path(user_template).absolute()))


def _innermost_line(trace: TracebackType | None) -> tuple[str | None, int | None]:
    """Return file and line of the innermost template in the traceback of an exception; (None, None)
    where no template is in it."""
    file, line = None, None
    while trace:
        # jinja sets this name in the modules that it compiles from templates.
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            file, line = template.filename, template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return file, line


def check_used(user_template: str | None, used: Collection[str]) -> None:
    """Refuse a template that overrides a block of ours which the submitit back-end does not use.
    `used` are the names of the blocks that this back-end uses. None (no template) passes.

    Raises
    ------
    UsageError
        the template, or one that it extends, has such a block (the message has file and line, and
        the names `used`); or a file may not act for the user
    jinja2.TemplateError, OSError, ValueError, RecursionError
        a template is missing, broken, can't be read, or extends itself. `render` has a UsageError
        for all these
    """
    if user_template is None:
        return
    path = _normal_path(user_template)
    environment = _make_environment(path.parent)
    our_blocks = _block_names(environment, BASE)
    for name, file, tree in _walk_chain(environment, str(path)):
        for block in tree.find_all(nodes.Block):
            if name != BASE and block.name in our_blocks and block.name not in used:
                raise UsageError(
                    f"{file}, line {block.lineno}: the submitit back-end does not use the block"
                    f" {block.name!r}; accepted: {', '.join(used)}",
                    hint="--backend slurm",
                )


def find_missing_words(script: str) -> list[str]:
    """Return a sentence for each word of `NEEDED` that a rendered script lacks outside of comments,
    with the consequence; [] for a script that has all."""
    return [
        f"the template leaves out {word.strip('=').split('|')[0]!r}: {consequence}"
        for word, consequence in NEEDED.items()
        # In a line that is no comment.
        if not re.search(rf"(?m)^(?!\s*#).*\b({word})", script)
    ]


def _check_blocks(environment: jinja2.Environment, name: str) -> None:
    """Raise UsageError, with file and line, for what jinja would pass over in silence: an unknown
    block, and text outside of a block.

    `name` is a template's name or path. The templates that it extends are checked, too, up to ours.
    A template that extends none passes, and so does one that extends a template whose name is
    computed, or that is missing. Raise further as `_read_source`, jinja's errors for a broken
    template, and RecursionError for one that extends itself.
    """
    text, file = _read_source(environment, name)
    tree = environment.parse(text, name, file)
    parent = _parent_name(tree.find(nodes.Extends))
    if parent is None:
        return
    try:
        if parent != BASE:
            _check_blocks(environment, parent)
        accepted = _block_names(environment, parent)
    except jinja2.TemplateNotFound:
        return  # the template's rendering raises this, with the line
    for node in _outside_of_blocks(tree.body):
        if isinstance(node, nodes.Block) and node.name not in accepted:
            names = ", ".join(accepted)
            raise _template_error(
                file,
                node.lineno,
                f"{parent} has no block {node.name!r}; accepted: {names}"
                + closest(node.name, accepted),
            )
        if isinstance(node, nodes.Output) and (line := _first_line(node)):
            raise _template_error(
                file, line, "this stands outside of a block, and would be left out of the script"
            )


def _outside_of_blocks(body: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """Yield each node in a template's `body` that lies in no block, also inside an ``if``, ``for``
    or ``with``; blocks, too, but not their content. The content of a macro, a ``call`` and a
    ``set`` is left out: it makes no output at its place."""
    without_content = (nodes.Block, nodes.Output, nodes.Macro, nodes.CallBlock, nodes.AssignBlock)
    for node in body:
        yield node
        if not isinstance(node, without_content):
            yield from _outside_of_blocks(node.iter_child_nodes())


def _first_line(output: nodes.Output) -> int | None:
    """Return the number of the line with the first word or expression of a text in a template; None
    where the text is blank."""
    for part in output.nodes:
        if not isinstance(part, nodes.TemplateData):  # an expression
            return part.lineno
        if part.data.strip():
            blank = part.data[: len(part.data) - len(part.data.lstrip())]
            return part.lineno + blank.count("\n")
    return None


def _block_names(environment: jinja2.Environment, name: str) -> list[str]:
    """Return the names of the blocks of a template and of the templates that it extends, each name
    once, the outermost parent's first. Raise as `_walk_chain`."""
    trees = [tree for _, _, tree in _walk_chain(environment, name)]
    names = (block.name for tree in reversed(trees) for block in tree.find_all(nodes.Block))
    return list(dict.fromkeys(names))


def _walk_chain(
    environment: jinja2.Environment, name: str
) -> Iterator[tuple[str, str | None, nodes.Template]]:
    """Yield name, file and content of a template, then of each that it extends. Raise
    RecursionError for a template that extends itself, jinja's errors for a broken one, and as
    `_read_source`."""
    text, file = _read_source(environment, name)
    tree = environment.parse(text, name, file)
    yield name, file, tree
    if parent := _parent_name(tree.find(nodes.Extends)):
        yield from _walk_chain(environment, parent)


def _parent_name(extends: nodes.Extends | None) -> str | None:
    """Return the name of the template that is extended; None where none is extended, or where the
    name is computed."""
    if extends is None or not isinstance(extends.template, nodes.Const):
        return None
    return str(extends.template.value)


def _read_source(environment: jinja2.Environment, name: str) -> tuple[str, str | None]:
    """Return a template's text, and the path of its file. Raise TemplateNotFound; UsageError for a
    file that may not act for the user; OSError or ValueError for a file that can't be read."""
    assert environment.loader
    text, file, _ = environment.loader.get_source(environment, name)
    return text, file


class _TrustedLoader(jinja2.FileSystemLoader):
    """Loads the user's templates: the named one, and all that it extends and includes."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        """Return a template's text, the path of its file, and a function that returns whether the
        text is still current. Raise TemplateNotFound; UsageError for a file that may not act for
        the user; OSError or ValueError for a file that can't be read."""
        _, file, is_current = super().get_source(environment, template)
        return trust.read_trusted(Path(file)).decode(), file, is_current


@cache  # keeps compiled templates: a job is rendered once to check it, and once to run it
def _make_environment(user_folder: Path | None) -> jinja2.Environment:
    """Return jinja's environment for the user's templates in `user_folder`, or for ours alone
    (None). The same folder gets the same environment. A name is looked for among our templates
    first: a user's template that extends ours may have the same name.
    """
    loaders: list[jinja2.BaseLoader] = [jinja2.FileSystemLoader(folder("templates"))]
    if user_folder:  # "/" is for the user's template, whose name is its absolute path
        loaders.append(_TrustedLoader([user_folder, "/"]))
    # A second wall behind `trust`: while it is rendered, a template can run nothing.
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.ChoiceLoader(loaders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # no autoescape: this is no HTML; every value goes through `q` or `in_double_quotes`
    environment.filters["q"] = quote
    environment.filters["in_double_quotes"] = quote_text_of_option
    return environment


def quote(word: object, expand: Sequence[str] = ()) -> str:
    """Return the text of `word` as one word for the shell, quoted where needed. The shell fills in
    the variables of `expand`."""
    return shell_word(str(word), expand)


def quote_text_of_option(word: str) -> str:
    """Return an option of ours, ``--x=$Y``, with its text in double quotes, ``--x="$Y"``: the shell
    fills in its variables. A word without a ``$`` behind a ``=`` stays as it is."""
    name, _, text = word.partition("=")
    return f'{name}="{text}"' if "$" in text else word
