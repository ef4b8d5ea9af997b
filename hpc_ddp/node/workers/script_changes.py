"""Statements of a script that may change what a later import finds, by their text."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Mapping

from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.node.workers.module_files import OURS
from hpc_ddp.node.workers.public_packages import HARMLESS_PACKAGES

# Variables that are read when a group, a device or a data loader starts, never at an import.
READ_LATE = re.compile(
    rf"{OF_A_RANK}|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|TORCH_HOME|(TORCH_)?NCCL_\w+"
)
# Variables that torch's libraries read at its import, as an interposed ``getenv`` has shown, and
# torch's own; others that its modules read are recorded (`first_import.READ`).
READ_AT_IMPORT = re.compile(
    r"(ATEN|BLIS|C10|CU|DNNL|GFORTRAN|GLIBC|GOMP|GOTO|HIP|HSA|I_MPI|KINETO|KMP|LD_|LLVM|MALLOC|MKL"
    r"|MPI_|NPY|NUMPY|NV|OMP_|ONEDNN|OPENBLAS|OPENSSL|PTXAS|PYTHON|PYTORCH|ROC|TORCH|TQDM|TRITON)\w*"
    r"|TMPDIR|TE?MP|HOME|USER(NAME)?|LOGNAME"
)
# Calls that an import may depend on, of Python and numpy.
SETTINGS = (
    *("chdir", "setlocale", "filterwarnings", "simplefilter", "basicConfig"),
    *("dictConfig", "fileConfig", "setLoggerClass", "seterr"),
)
# Functions that set nothing, of modules of Python whose others do: they write, read or make an
# object.
NO_SETTINGS = {
    "logging": re.compile(
        r"get\w+|debug|info|warn|warning|error|exception|critical|fatal|log|makeLogRecord|[A-Z]\w*"
    ),
    "warnings": re.compile(r"warn|warn_explicit|formatwarning"),
    "locale": re.compile(r"(get|format|str|ato)\w*|localeconv|currency|normalize|delocalize"),
}
# Methods of loggers that set something.
OF_LOGGERS = ("setLevel", "addHandler", "removeHandler", "addFilter")
FIELDS_OF_LOGGERS = ("propagate", "disabled")
# Names of Python that may change an import, run any text, or start processes, which would outlive a
# script that starts again (`first_import`).
ACTING = (
    *("sys", "importlib", "unittest", "site", "ctypes", "subprocess", "tracemalloc"),
    *("multiprocessing", "concurrent", "runpy", "setattr", "exec", "eval", "__import__"),
)
VALUES_OF_SYS = re.compile(r"argv|byteorder|executable|maxsize|platform|std\w+|version\w*")
HARMLESS = {"os"}  # the variables that it changes are seen by `_changes_variable`
# It sets something, or runs a program, such as pip.
SETTERS_OF_OS = re.compile(
    r"(sched_)?set(?!default)\w+|umask|nice|system|popen|(posix_)?spawn\w*|exec\w+|fork\w*"
)
# Functions of other modules that change what a later import finds; modules whose own ones do not.
SETTERS = re.compile(r"(set|init|use|enable|disable|register|install)_?\w*")
SETTING_THEMSELVES = (
    *("matplotlib", "pandas", "seaborn", "numpy", "cv2", "faulthandler", "gc", "atexit"),
)
# Python's modules and functions that call nothing of what they get, but for a value.
OF_TEXT = ("argparse", "pathlib", "json", "re", "math", "datetime", "time", "glob", "shutil")
VALUES = (
    *("print", "int", "float", "str", "bool", "len", "max", "min", "range"),
    *("getattr", "isinstance"),
)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STATEMENTS = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
READS = ("get", "copy", "items", "keys", "values", "__contains__", "__getitem__")  # of os.environ


def parts_that_call(node: ast.stmt) -> list[ast.expr]:
    """Return the parts of a statement that are called without parentheses: the decorators of a
    function or class, the bases of a class, and what a ``with`` enters."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [entered.context_expr for entered in node.items]
    if not isinstance(node, DEFINITIONS):
        return []
    bases = (
        [*node.bases, *(k.value for k in node.keywords)] if isinstance(node, ast.ClassDef) else []
    )
    inside = node.body if isinstance(node, ast.ClassDef) else []
    return [
        *node.decorator_list,
        *bases,
        *(part for inner in inside for part in parts_that_call(inner)),
    ]


def parts_that_run(node: ast.stmt) -> list[ast.AST]:
    """Return the parts of a statement that run where it stands: a test, what a loop goes through,
    the items of a ``with``; of a function its decorators and defaults, of a class also its body.
    The statements inside of others are left out."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
        return [*node.decorator_list, *defaults]
    if isinstance(node, ast.ClassDef):
        inside = [part for statement in node.body for part in parts_that_run(statement)]
        return [*node.decorator_list, *node.bases, *(k.value for k in node.keywords), *inside]
    if isinstance(node, (ast.If, ast.While)):
        return [node.test]
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.target, node.iter]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [part for i in node.items for part in (i.context_expr, i.optional_vars) if part]
    if isinstance(node, ast.Match):
        return [node.subject]
    return [node] if isinstance(node, (*STATEMENTS, ast.Assert)) else []


def has_call(node: ast.AST) -> bool:
    """Return whether a call is in a part of a file."""
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def may_change_anything(node: ast.AST, modules: Mapping[str, str]) -> bool:
    """Return whether a statement or a part of one, `node`, may change what a later import finds: a
    variable, the search path or a setting; or, in a way that its text does not show, by a patch of
    a module or a call of a function that may do so. `modules` has the names that the file has bound
    so far, with the module of each; '' for a function or class; ``*`` for all names of a module."""
    return any(
        _patches(inner, modules) or _changes_variable(inner) or _may_run_anything(inner, modules)
        for inner in ast.walk(node)
    )


def _patches(target: ast.AST, modules: Mapping[str, str]) -> bool:
    """Return whether an expression is a part of a module, or a field of a logger, that is set."""
    is_part = isinstance(target, (ast.Attribute, ast.Subscript))
    if not is_part or isinstance(target.ctx, ast.Load):  # type: ignore[attr-defined]
        return False
    if isinstance(target, ast.Attribute) and target.attr in FIELDS_OF_LOGGERS:
        return True
    is_variable = isinstance(target, ast.Subscript) and _is_environ(target.value)
    # Also of `vars(module)["name"] = …`; `_changes_variable` sees variables.
    return not is_variable and any(name in modules for name in _base_names(target))


def _may_run_anything(node: ast.AST, modules: Mapping[str, str]) -> bool:
    """Return whether a part of a statement is a call that may change what a later import finds: of
    a function that may, by its name or its module, or with one among its arguments. `modules` is as
    in `may_change_anything`."""
    if not isinstance(node, ast.Call):
        return False
    root, name = _root(node.func), function_name(node)
    if _is_setting(node, modules):
        return True
    if root in HARMLESS:
        return SETTERS_OF_OS.fullmatch(name) is not None
    # `from module import *` may have bound any name but Python's.
    is_any = root and not hasattr(builtins, root)
    module = modules.get(root, modules.get("*") if is_any else None)
    is_unread = module is not None and not _is_safe(module)
    is_value = _is_value_of_sys(getattr(node.func, "value", None))  # sys.stdout.reconfigure()
    if name in OF_LOGGERS or ((root in ACTING or is_unread) and not is_value):
        return True
    top = (module or "").partition(".")[0]
    if top and top not in (*OF_TEXT, *SETTING_THEMSELVES) and SETTERS.fullmatch(name):
        return not is_value
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    if module in OF_TEXT:  # argparse, say, calls a function that it gets as a type
        return any(modules.get(getattr(argument, "id", "")) == "" for argument in arguments)
    return root not in VALUES and any(uses_unread(argument, modules) for argument in arguments)


def uses_unread(node: ast.AST, modules: Mapping[str, str]) -> bool:
    """Return whether a part of a statement has a name of a module, function or class that may
    change what a later import finds, once it is called, entered or a base of a class. `modules` is
    as in `may_change_anything`."""
    if _is_value_of_sys(node):
        return False
    if isinstance(node, ast.Name):
        return node.id in modules and not _is_safe(modules[node.id])
    return any(uses_unread(part, modules) for part in ast.iter_child_nodes(node))


def _is_value_of_sys(node: ast.AST | None) -> bool:
    """Return whether an expression is a value of ``sys`` by which nothing is changed, as its
    arguments."""
    is_of_sys = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "sys"
    return is_of_sys and VALUES_OF_SYS.fullmatch(getattr(node, "attr", "")) is not None


def _base_names(node: ast.AST) -> list[str]:
    """Return the names in the expression with which one such as ``a.b[i].c`` begins: ``a``; of
    ``vars(a)["b"]`` they are those of the call."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return _names_in(node)


def _names_in(node: ast.AST) -> list[str]:
    """Return the names of variables in an expression, also those that it sets."""
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def _is_safe(module: str) -> bool:
    """Return whether a module, by its name, is one whose functions mostly change no later import;
    False for '', a function or class of the file."""
    top = module.partition(".")[0]
    is_of_python = top in sys.stdlib_module_names and top not in ACTING
    return is_of_python or top == OURS or top in HARMLESS_PACKAGES


def bound_names(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return the names that an import binds, with the module of each."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
    module = f"{'.' * node.level}{node.module or ''}"
    return {alias.asname or alias.name: module for alias in node.names}


def aliases_of(node: ast.stmt, modules: Mapping[str, str]) -> dict[str, str]:
    """Return the names that an assignment, a loop or a ``with`` gives to a module or function, or
    to a part of one, with the module of each; `modules` is as in `may_change_anything`."""
    pairs: list[tuple[ast.AST | None, ast.AST]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value:
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        pairs = [(entered.optional_vars, entered.context_expr) for entered in node.items]
    aliases: dict[str, str] = {}
    for target, text in pairs:
        parts = text.elts if isinstance(text, (ast.Tuple, ast.List)) else [text]
        parts = text.values if isinstance(text, ast.Dict) else parts
        for root in [root for part in parts if (root := _root(part)) in modules]:
            aliases |= dict.fromkeys(_names_set(target), modules[root])
    return aliases


def _names_set(target: ast.AST | None) -> list[str]:
    """Return the names that an assignment to `target` sets: a name, or those of a tuple."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for part in target.elts for name in _names_set(part)]
    target = target.value if isinstance(target, ast.Starred) else target
    return [target.id] if isinstance(target, ast.Name) else []


def _root(node: ast.AST) -> str:
    """Return the name with which an expression such as ``a.b[0].c()`` begins, '' without one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _changes_variable(node: ast.AST) -> bool:
    """Return whether a statement, an expression or a call changes a variable of the environment on
    which an import may depend."""
    if isinstance(node, ast.Subscript) and _is_environ(node.value):
        return isinstance(node.ctx, (ast.Store, ast.Del)) and _may_be_read(node.slice)
    if isinstance(node, ast.AugAssign):
        return _is_environ(node.target)
    if isinstance(node, ast.Assign):
        return any(_is_environ(target) for target in node.targets)
    if not isinstance(node, ast.Call):
        return False
    function, name = node.func, function_name(node)
    if name in ("putenv", "unsetenv", "load_dotenv"):
        return True
    if not isinstance(function, ast.Attribute) or not _is_environ(function.value):
        return False
    if name == "update":
        keys: list[ast.AST | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        keys += [k for words in node.args for k in getattr(words, "keys", [words])]
        return any(key is None or _may_be_read(key) for key in keys)
    if name in ("setdefault", "pop", "__setitem__", "__delitem__"):
        return not node.args or _may_be_read(node.args[0])
    return name not in READS


def _is_setting(call: ast.Call, modules: Mapping[str, str]) -> bool:
    """Return whether a call sets something on which an import may depend, such as a folder, a
    filter of warnings or a log. `modules` is as in `may_change_anything`."""
    name, module = function_name(call), modules.get(_root(call.func), "")
    harmless = NO_SETTINGS.get(module.partition(".")[0])
    return name in SETTINGS or bool(harmless and not harmless.fullmatch(name))


def function_name(node: ast.Call) -> str:
    """Return the name of a called function, '' if it has none."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_environ(node: ast.AST) -> bool:
    """Return whether an expression is ``os.environ``, or its form of bytes."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("environ", "environb")


def _may_be_read(key: ast.AST) -> bool:
    """Return whether `key`, a key of ``os.environ``, is a variable that torch's libraries read at
    the import, or no plain text."""
    name = key.value if isinstance(key, ast.Constant) else ""
    name = name.decode(errors="replace") if isinstance(name, bytes) else name
    if not name or not isinstance(name, str):
        return True
    return bool(READ_AT_IMPORT.fullmatch(name)) and not READ_LATE.fullmatch(name)
