"""Statements of a script that may change what a later import finds, by their text."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Mapping

from hpc_ddp.core.job.variables import OF_A_RANK

# Variables that are read when a group, a device or a data loader starts, never at an import.
READ_LATE = re.compile(
    rf"{OF_A_RANK}|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|TOKENIZERS_PARALLELISM|(TORCH_)?NCCL_\w+|GLOO_\w+|FI_\w+|UCX_\w+"
)
# Calls that an import may depend on, of torch, Python and numpy.
SETTINGS = (
    *("set_default_dtype", "set_default_device", "set_default_tensor_type"),
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
OF_LOGGERS = ("setLevel", "addHandler", "removeHandler", "addFilter")
FIELDS_OF_LOGGERS = ("propagate", "disabled")
SET_NOTHING = ("torch", "torchvision", "numpy", "hpc_ddp")  # their functions change no later import
# Names of Python that may change an import, or run any text.
ACTING = (
    *("sys", "importlib", "unittest", "site", "ctypes", "subprocess"),
    *("runpy", "setattr", "exec", "eval", "__import__"),
)
HARMLESS = {"os"}  # what it changes is seen by `change_of`
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STATEMENTS = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)
READS = ("get", "copy", "items", "keys", "values", "__contains__", "__getitem__")  # of os.environ
CHANGES_OF_PATH = ("insert", "remove", "pop", "clear", "sort", "reverse")


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
        return [node.iter]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [entered.context_expr for entered in node.items]
    if isinstance(node, ast.Match):
        return [node.subject]
    return [node] if isinstance(node, (*STATEMENTS, ast.Assert)) else []


def has_call(node: ast.AST) -> bool:
    """Return whether a call is in a part of a file."""
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def may_change_anything(node: ast.AST, modules: Mapping[str, str]) -> bool:
    """Return whether a statement or a part of one, `node`, may change what a later import finds, in
    a way that its text does not show: it patches a module, or calls a function that may do so.
    `modules` has the names that the file has bound so far, with the module of each; '' for a
    function or class; ``*`` for all names of a module."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for target in targets:
        is_part = isinstance(target, (ast.Attribute, ast.Subscript))
        is_variable = isinstance(target, ast.Subscript) and _is_environ(target.value)
        if is_part and not is_variable and _root(target) in modules:  # `change_of` sees variables
            return True
        if isinstance(target, ast.Attribute) and target.attr in FIELDS_OF_LOGGERS:
            return True
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and function_name(call) in OF_LOGGERS:
            return True
        if isinstance(call, ast.Call) and (root := _root(call.func)) not in HARMLESS:
            # `from module import *` may have bound any name but Python's.
            is_any = root and not hasattr(builtins, root)
            module = modules.get(root, modules.get("*") if is_any else None)
            top = (module or "").partition(".")[0]
            is_safe = top in SET_NOTHING or (top in sys.stdlib_module_names and top not in ACTING)
            if root in ACTING or (module is not None and not is_safe):
                return True
    return False


def aliases_of(node: ast.stmt, modules: Mapping[str, str]) -> dict[str, str]:
    """Return the names that an assignment gives to a module or function, or to a part of one, with
    the module of each; `modules` is as in `may_change_anything`."""
    if not isinstance(node, ast.Assign) or _root(node.value) not in modules:
        return {}
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return dict.fromkeys(names, modules[_root(node.value)])


def _root(node: ast.AST) -> str:
    """Return the name with which an expression such as ``a.b[0].c()`` begins, '' without one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def change_of(node: ast.AST) -> str:
    """Return, in words, the variable that a statement or call changes, ``sys.path`` or
    ``sys.modules``; '' if it changes nothing on which an import may depend."""
    is_set = isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del))
    if is_set and _is_environ(node.value):  # type: ignore[attr-defined]
        return _variable(node.slice)  # type: ignore[attr-defined]
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_name(target.value, "path", "sys"):
                return "sys.path"
            if isinstance(target, ast.Subscript) and _is_name(target.value, "modules", "sys"):
                return "sys.modules"
            if _is_name(target, "environ") or _is_name(target, "path", "sys"):
                return ast.unparse(target)
    if not isinstance(node, ast.Call):
        return ""
    function, name = node.func, function_name(node)
    if name in ("putenv", "unsetenv", "load_dotenv"):
        return "its environment"
    if not isinstance(function, ast.Attribute):
        return ""
    if _is_environ(function.value) and name in ("setdefault", "pop", "__setitem__", "__delitem__"):
        return _variable(node.args[0]) if node.args else "its environment"
    if _is_environ(function.value) and name not in READS:
        return "its environment"
    is_of_path = _is_name(function.value, "path", "sys") and name in CHANGES_OF_PATH
    return "sys.path" if is_of_path else ""


def setting_of(call: ast.Call, modules: Mapping[str, str]) -> str:
    """Return the name of a function that sets something on which an import may depend, '' for any
    other call. `modules` has the names that imports of the file have bound, with the module of
    each."""
    name, root = function_name(call), call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    module = modules.get(getattr(root, "id", ""), "").partition(".")[0]
    harmless = NO_SETTINGS.get(module)
    return name if name in SETTINGS or (harmless and not harmless.fullmatch(name)) else ""


def function_name(node: ast.Call) -> str:
    """Return the name of a called function, '' if it has none."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def renaming_of(node: ast.AST) -> str:
    """Return, in words, what a statement gives another name, by which `change_of` would not see a
    change: the module ``sys``, a variable of ``sys`` or ``os``, or a setting. '' for any other
    statement."""
    if isinstance(node, ast.Import):
        return "sys" if any(a.name == "sys" and a.asname for a in node.names) else ""
    if isinstance(node, ast.ImportFrom):
        harmless = NO_SETTINGS.get((node.module or "").partition(".")[0])
        for name in (alias.name for alias in node.names if alias.asname):
            if name in SETTINGS or (harmless and not harmless.fullmatch(name)):
                return "the name of a setting"
    if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
        for alias in node.names:
            if (node.module == "sys" and alias.name in ("path", "modules")) or (
                alias.name == "environ" and alias.asname
            ):
                return f"{node.module}.{alias.name}"
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Attribute):
        if _is_name(node.value, "environ"):
            return "os.environ"
        if _is_name(node.value, "path", "sys") or _is_name(node.value, "modules", "sys"):
            return "sys.path"
    return ""


def _is_name(node: ast.AST, name: str, module: str = "") -> bool:
    """Return whether the expression `node` is `name` or ends with ``.name``; with `module`, whether
    it is ``module.name``."""
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "id", "")
        return node.attr == name and (not module or owner == module)
    return not module and isinstance(node, ast.Name) and node.id == name


def _is_environ(node: ast.AST) -> bool:
    """Return whether an expression is ``os.environ``, or its form of bytes."""
    return _is_name(node, "environ") or _is_name(node, "environb")


def _variable(key: ast.AST) -> str:
    """Return the name of the variable for which `key`, a key of ``os.environ``, stands; '' for a
    variable of `READ_LATE`, ``its environment`` where the key is no constant."""
    name = key.value if isinstance(key, ast.Constant) else ""
    name = name.decode(errors="replace") if isinstance(name, bytes) else name
    if isinstance(name, str) and READ_LATE.fullmatch(name):
        return ""
    return str(name) or "its environment"
