"""The syntax tree of a job script: searches in it, and conditions whose truth follows from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts

if TYPE_CHECKING:
    from hpc_ddp.submission.job_script.bash.scope import Scope
    from hpc_ddp.submission.job_script.bash.values import Value

Node = Any  # a tree_sitter.Node: the package is optional
# Also of an option; but not a redirection, which has a word behind it: sort <a> b.
_PLACEHOLDER = re.compile(
    rb"(?m)(?<!\S)<[A-Za-z][\w .-]*>(?=[ \t]*(?:$|#|\\\n|<[A-Za-z]))"
    rb"|(?<==)<[A-Za-z][\w .-]*>(?=\s|$)"
)
_ARGUMENTS = re.compile(r"(?<!\\)\$(?:[1-9@*#]|\{(?:[1-9@*](?!:?-)[^}]*|#)\})")
_ALL_ARGUMENTS = re.compile(r"(?<!\\)\$(?:[@*]|\{[@*]\})")
# What is added to a text in double quotes: no operator of the shell, but within ``$(…)``.
_ADDED_TEXT = r"(?:\\[\s\S]|\$\((?:[^()]|\([^()]*\))*\)|(?!\$\()[^\"\\;&|<>])*"
# Lines that end within a word, and what follows of it.
_CHUNK = rb"""(?:\$\([^()]*\)|[^\s\\"'`;&|()<>]|"(?:\\.|[^"\\])*"|'[^'\n]*'|\\[^\n])+"""
_BROKEN_WORD = re.compile(rb"(?:(?:\\\n)+%b)+" % _CHUNK, re.S)
_OF_WORDS = ("word", "string", "raw_string", "concatenation", "number", "command_name", "=",
             "simple_expansion", "expansion", "command_substitution")  # fmt: skip
_BARE_TEXT = re.compile(rb"[ \t]*<<[^<]")  # a here-document that has no command
_IN_TEXT = ("string", "heredoc_body", "simple_expansion", "expansion")
# Commands by which scripts count the job's nodes, the GPUs of their node, and those of a list.
_NODES = r"(\$\(|`)\s*scontrol\s+show\s+hostnames?(\s+\"?\$\{?SLURM_(JOB_)?NODELIST\}?\"?)?\s*"
_COUNTS_NODES = re.compile(rf"{_NODES}\|\s*wc -[lw]\s*[)`]")
_LISTS_NODES = re.compile(rf"{_NODES}[)`]")
_LENGTH = re.compile(r"\$\{#(\w+)\[[@*]\]\}")  # of an array
_COUNTS_GPUS = re.compile(
    r"(\$\(|`)\s*nvidia-smi\s+(-L|--list-gpus|--query-gpu=\w+\s+--format=csv,noheader)"
    r"\s*\|\s*wc -l\s*[)`]"
)
_COUNTS_LISTED = re.compile(
    r"(\$\(|`)\s*(jq -n \"\[\$\{?CUDA_VISIBLE_DEVICES\}?\] *\| *length\""
    r"|echo\s+\"?\$\{?CUDA_VISIBLE_DEVICES\}?\"?\s*\|"
    r"\s*(tr\s+[\"']?,[\"']?\s[^|;&()`]*\|\s*wc\s+-[lw]"
    r"|awk\s+-F\s*[\"']?,[\"']?\s+'\{\s*print NF;?\s*\}'))\s*[)`]"
)
# A file that is sourced sets any variable; these set none that a job script asks for.
_SOURCES = re.compile(r"(?:^|[\s;&])(?:source|\.)\s+[\"']?(\S+)")
_OF_SYSTEM = re.compile(r"/etc/|.*(activate|conda\.sh|bashrc|profile|modules\.sh)[\"']?$")
_REPORTING = {"echo", "printf", "date", "exit", "return", "true", ":", "test", "wait"}
# Commands that set a variable whose name only the job knows.
_SETS_BY_NAME = re.compile(r"\b(?:export|declare|local|read|printf\s+-v)\s(?:-\w+\s+)*[\"']?\$")
# Commands that may set variables whose names are among their words.
_SETTERS = ("read", "mapfile", "readarray", "printf", "let", "getopts", "declare")


def parse(text: str) -> Node:
    """Return the root of the syntax tree of a bash script. The tree's text differs a little from
    the script's: a placeholder, ``=<name>``, has quotes; see also `_with_whole_words`. Raises
    UsageError where the parser of bash, or that of YAML, is not installed."""
    try:
        import tree_sitter
        import tree_sitter_bash
        import yaml  # noqa: F401  which Accelerate's configuration needs
    except ImportError:
        raise UsageError(
            "import needs a parser of bash, which is not installed; accepted: hpc-ddp[import]",
            hint="pip install tree-sitter tree-sitter-bash pyyaml",
        ) from None
    language = tree_sitter.Language(tree_sitter_bash.language())
    parser, before = tree_sitter.Parser(language), b""
    text = re.sub(r"(\\(\n|$)\s*)+$", "", text) + "\n"  # a line that goes on, and does not
    text = text.replace("$(((", "$(( (")  # which tree-sitter-bash 0.25 reads as commands in ${…}
    code = _quote_placeholders(parser.parse(text.encode()).root_node, text.encode())
    while code != before:
        root, before = parser.parse(code).root_node, code
        code = _with_whole_words(root, code)
    return root


def _quote_placeholders(root: Node, code: bytes) -> bytes:
    """Return a script's text with quotes around each word ``<name>``, which is no redirection, but
    not in texts that have quotes, or are of a here-document. `code` is the text, `root` its
    tree."""
    nodes = (node for node in all_below(root) if node.type in (*_IN_TEXT, "raw_string"))
    texts = [range(node.start_byte, node.end_byte) for node in nodes]
    return _PLACEHOLDER.sub(
        lambda m: m[0] if any(m.start() in text for text in texts) else b"'%b'" % m[0], code
    )


def _with_whole_words(root: Node, code: bytes) -> bytes:
    """Return a script's text, changed where tree-sitter-bash 0.25 sees the end of a word too early,
    without an error: with ``${NAME}`` for ``$NAME``, ``'x'`` for ``\\x``, and a line's end within a
    word moved behind the word; with ``;`` behind a line of assignments, and with ``:`` before a
    here-document that has no command. `code` is the text, `root` the tree of it."""
    nodes, edits = [*root.children], {}
    breaks: dict[int, int] = {}  # where a word with broken lines begins, by where it ends
    while nodes:
        node = nodes.pop()
        nodes += node.children
        start = code.rfind(b"\n", 0, node.start_byte) + 1
        if node.type == "<" and _BARE_TEXT.fullmatch(code[start : node.start_byte + 3]):
            edits[start, start] = b": "  # of <<
        after = node.next_sibling
        if node.type == "variable_assignment" and node.parent.type == "command" and after:
            between = code[node.end_byte : after.start_byte].replace(b"\\\n", b"")
            if (
                b"\n" in between or after.type == "comment"
            ):  # which bash does not take for the variables of one command
                edits[node.end_byte, node.end_byte] = b";"
        name = re.compile(rb"[A-Za-z_]\w*|\d").match(code, node.end_byte)
        if name and node.type == "$" and node.parent.type != "simple_expansion":
            edits[name.span()] = b"{%b}" % name[0]
        end = node.next_sibling.start_byte if node.next_sibling else node.parent.end_byte
        end = max(end, node.end_byte + 2) if node.type not in (")", "))", "`") else end
        for blank in re.compile(rb"\\([\t -&(-~])").finditer(code, node.end_byte, end):
            if node.parent.type not in _IN_TEXT:
                edits[blank.span()] = b"'%b'" % blank[1]
        variable = (
            re.match(rb"(\w+)(?:\\\n)+$", node.text) if node.type == "variable_name" else None
        )
        if variable and node.parent.type == "simple_expansion":
            edits[node.start_byte, node.start_byte + len(variable[1])] = b"{%b}" % variable[1]
        broken = _BROKEN_WORD.match(code, node.end_byte) if node.type in _OF_WORDS else None
        is_end = re.search(rb"(?<!\\)\s$", code[max(0, node.end_byte - 2) : node.end_byte])
        if broken and node.parent.type not in _IN_TEXT and not is_end:
            breaks[broken.end()] = min(broken.start(), breaks.get(broken.end(), len(code)))
    if not edits:
        for end, start in breaks.items():
            lines = code[start:end].count(b"\\\n")
            edits[start, end] = code[start:end].replace(b"\\\n", b"") + b" " + b"\\\n" * lines
    for (start, end), new in sorted(edits.items(), reverse=True):
        code = code[:start] + new + code[end:]
    return code


def source(node: Node) -> str:
    """Return the text of a node; '' for None."""
    return "" if node is None else node.text.decode()


def uses_arguments(text: str, is_without: bool = False) -> bool:
    """Return whether some code uses the script's own arguments (``$1``, ``$@``, ``$#``). One with a
    default, ``${1:-x}``, does not count; nor do those of awk or Python, in single quotes. With
    `is_without`, for a script without arguments, ``$@`` does not count either."""
    code = without_quoted_texts(text)
    return bool(_ARGUMENTS.search(_ALL_ARGUMENTS.sub("", code) if is_without else code))


def commands_of(node: Node) -> list[Node]:
    """Return all commands in a node, in order, and the node itself if it is a command. Commands in
    substitutions are left out."""
    return [inner for inner in _descend(node) if inner.type == "command"]


def body_of(node: Node) -> Node:
    """Return the body of a function, or of a loop that is no ``while``; else the node itself."""
    body = None if node.type == "while_statement" else node.child_by_field_name("body")
    return body or node


def is_comment(node: Node) -> bool:
    """Return whether a node is a here-document that nothing reads, and in which nothing is run."""
    if node.type != "redirected_statement":
        return False
    first, *redirects = node.named_children
    start = source(redirects[0].named_children[0]) if redirects else ""
    is_plain = start[:1] in ("'", '"', "\\") or not re.search(r"`|\$\(|\$\{\w*[^\w}]", source(node))
    is_text = [redirect.type for redirect in redirects] == ["heredoc_redirect"]
    return source(first) == ":" and is_text and is_plain


def only_reports(node: Node) -> bool:
    """Return whether a block, with all its branches, does no more than print or end the script."""
    kinds = {inner.type for inner in _descend(node)}
    names = {source(command.child_by_field_name("name")) for command in commands_of(node)}
    code = re.search(r"`|\$\((?!\(|date|hostname)", source(node))
    sets = {"variable_assignment", "unset_command", "declaration_command", "function_definition"}
    is_empty = not names and node.type != "comment"
    return names <= _REPORTING and not (is_empty or code or kinds & {"file_redirect", *sets})


def set_in(node: Node) -> set[str]:
    """Return the variables that a block may set, as ``N`` by ``for N in 1 2``, ``read N`` or
    ``((N++))``; some of its other words may be among them."""
    names: set[str] = set()
    for inner in _descend(node):
        words, kind = [source(child) for child in inner.named_children], inner.type
        if kind in ("variable_assignment", "for_statement"):
            names.add(re.split(r"\W", words[0])[0])
        elif kind == "unset_command" or source(inner.child_by_field_name("name")) in _SETTERS:
            names |= {re.split(r"\W", word)[0] for word in words}
        elif kind.endswith("_expression") and re.search(r"[^=!<>]=[^=]|\+\+|--", source(inner)):
            names |= {*words[:1]}
    return {name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name)}


def is_added(name: str, text: str) -> bool:
    """Return whether an assignment adds words to the end of the variable `name`: ``NAME+=(…)``,
    ``NAME=("${NAME[@]}" …)``, ``NAME+=" …"`` or ``NAME="$NAME …"``; not one that goes on with the
    last word, or adds operators of the shell, as for ``eval``."""
    array = rf"{name}(\+=\(|=\(\s*\"\$\{{{name}\[@\]\}}\"\s)"
    blank = r"(?=\s|\\\n)"
    double = rf"{name}(\+=\"|=\"\$({name}|\{{{name}\}})){blank}{_ADDED_TEXT}\"$"
    return any(re.match(form, text) for form in (array, double, rf"{name}\+='\s[^';&|<>]*'$"))


def is_only_added(name: str, node: Node) -> bool:
    """Return whether a block adds words to the variable `name` by assignments (`is_added`), and
    does not name it elsewhere but in comments and prints."""
    inner = [*_descend(node)]
    texts = [source(n) for n in inner if n.type == "variable_assignment"]
    texts = [text for text in texts if re.match(rf"{name}\b", text)]
    prints = [source(n) for n in inner if n.type == "comment" or _is_print(n)]
    remaining = source(node)
    for text in (*texts, *prints):
        remaining = remaining.replace(text, " ", 1)
    is_elsewhere = re.search(rf"\b{name}\b", remaining)
    return bool(texts) and not is_elsewhere and all(is_added(name, text) for text in texts)


def _is_print(node: Node) -> bool:
    """Return whether a node is a command that only prints, and not into a file or a pipe."""
    around = ("redirected_statement", "pipeline")
    is_plain = node.type == "command" and node.parent.type not in around
    return is_plain and source(node.child_by_field_name("name")) in ("echo", "printf")


def sets_anything(text: str) -> bool:
    """Return whether some code may set any variable: it sources a file, evaluates a text, or sets a
    variable by another one's value, as ``export $NAME=1``."""
    evaluates = re.search(r"\beval\s(?!.*\bconda\b)", text) or _SETS_BY_NAME.search(text)
    return bool(evaluates) or any(not _OF_SYSTEM.match(path) for path in _SOURCES.findall(text))


def names_needed(text: str, name: str) -> set[str]:
    """Return the variables and functions that a statement's `text` may need; some other words may
    be among them.

    `name` is the variable that the statement sets or exports, '' for none. It counts only if the
    text uses it: by its value, or as the bare word of ``export A``.

    - ``A=$B`` with "A": {"B"}
    - ``A=$A:x`` with "A": {"A"}, and ``A``, of ``export A``, with "A": {"A"}
    - ``trap 'f' EXIT`` with "": {"f"}, which may be a function
    """
    is_trap = text.startswith("trap")  # it runs its text
    text = re.sub("[\"']", " ", text) if is_trap else without_quoted_texts(text)
    before = r"(?:trap(?:\s+--)?|then|do|else|elif|if|while|until|time)\b"
    called = re.findall(rf"(?:^|[;&|({{`!\n]|\b{before})\s*(?!{before})([A-Za-z_]\w*)", text)
    exported = text.split()[2:] if text.startswith("export -f") else []
    names = {*names_in(text), *called, *exported}
    uses_name = name == text or re.search(rf"\$\{{?{name}\b", text)
    return names if uses_name else names - {name}


def is_pattern(node: Node) -> bool:
    """Return whether bash makes other words of an unquoted one: names of files, as of ``*.py``, or
    those that ``{a,b}`` stands for."""
    if node.type not in ("word", "concatenation"):
        return False
    text = re.sub(r"'[^']*'|\"(\\.|[^\"\\])*\"|\$\{[^}]*\}", "", source(node))
    is_of_files = not node.named_children and re.search(r"(?<!\\)[*?]", text)
    # Not the list of an argument, as Hydra's layers=[1,2].
    is_of_files = is_of_files or re.search(r"(?<![\\=])\[[^],\s]+\]", text)
    return bool(is_of_files or re.search(r"(?<![$\\])\{[^{}\s]*(,|\.\.)[^{}\s]*\}", text))


def names_in(code: str) -> list[str]:
    """Return the variables that some code mentions, also those of arithmetic: of ``$A $((B+1))``
    they are A and B."""
    inside = " ".join(re.findall(r"\(\((.*?)\)\)", code, re.S))
    return re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", code) + re.findall(r"[A-Za-z_]\w*", inside)


def with_counts(code: str, scope: Scope) -> str:
    """Return code with the number of the job's nodes, or of a node's GPUs, as Slurm's variable, in
    place of each command that counts them, and of the length of an array of nodes. The GPUs in
    CUDA_VISIBLE_DEVICES are as many as in its value in `scope`; without one the job has it from
    Slurm."""
    values, counts = scope.values, scope.of_devices
    code = _COUNTS_NODES.sub("$SLURM_NNODES", code)
    code = _LENGTH.sub(lambda m: counts.get(m[1]) or _length(values.get(m[1])) or m[0], code)
    code = _COUNTS_GPUS.sub("$SLURM_GPUS_ON_NODE", code)
    return _COUNTS_LISTED.sub(count_devices(values.get("CUDA_VISIBLE_DEVICES")), code)


def count_devices(listed: Value) -> str:
    """Return the number of GPUs in a value of CUDA_VISIBLE_DEVICES, or Slurm's variable for it
    where the value is not known here."""
    is_known = listed and not isinstance(listed, list) and listed.is_static and listed.text
    return str(len(listed.text.split(","))) if is_known else "$SLURM_GPUS_ON_NODE"  # type: ignore[union-attr]


def _length(array: Value) -> str:
    """Return the number of an array's elements, of the job's nodes as Slurm's variable; '' where it
    is not known."""
    if not isinstance(array, list):
        return ""
    if len(array) == 1 and _LISTS_NODES.fullmatch(array[0].text):
        return "$SLURM_NNODES"
    return str(len(array)) if all(word.is_static for word in array) else ""


def redirected(node: Node) -> Node:
    """Return the command or block whose output a node redirects, else the node itself."""
    while node.type == "redirected_statement":
        node = node.named_children[0]
    return node


def target_of(node: Node) -> str:
    """Return the file that a pipeline or a command with redirections writes to: ``a pipe`` for
    another pipeline, '' without one."""
    targets = re.findall(r"(?:>>?|\btee (?:-a )?)\s*([^\s&|;>]+)", source(node))
    default = "a pipe" if node.type == "pipeline" else ""
    return next((target for target in targets if target != "1"), default)


def files_written(text: str) -> set[str]:
    """Return the files that some code writes, by redirections of its output or by ``tee``: without
    quotes, ``./`` and the braces of variables."""
    nodes = [*_descend(parse(text))]
    texts = [source(node) for node in nodes if node.type == "file_redirect"]
    words = [re.fullmatch(r"1?>>?\s*([\"']?)([^&\s]+?)\1", redirect) for redirect in texts]
    words += [re.fullmatch(r"tee\s+(?:-a\s+)?([\"']?)(\S+?)\1", source(node)) for node in nodes]
    files = {re.sub(r"\$\{(\w+)\}", r"$\1", word[2]) for word in words if word}
    return {re.sub(r"^(\.|\$PWD)/", "", file) for file in files if not file.startswith("/dev/")}


def reads_input(node: Node, command: Node) -> bool:
    """Return whether the standard input of `command` is a file, a text or another command's output.
    `node` is the pipeline or redirection around the command, or the command itself."""
    is_first = node.type != "pipeline" or commands_of(node)[0].start_byte == command.start_byte
    kinds = ("heredoc_redirect", "herestring_redirect")
    return not is_first or any(
        inner.type in kinds or (inner.type == "file_redirect" and source(inner)[0] == "<")
        for inner in _descend(node)
    )


def all_below(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, in order."""
    yield node
    for child in node.named_children:
        yield from all_below(child)


def _descend(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, in order. Left out are substitutions, and assignments
    that hold for one command alone."""
    yield node
    is_named = node.type == "command" and node.child_by_field_name("name") is not None
    for child in node.named_children:
        is_prefix = is_named and child.type == "variable_assignment"
        if child.type not in ("command_substitution", "process_substitution") and not is_prefix:
            yield from _descend(child)


def lines_of(node: Node) -> tuple[int, int]:
    """Return the first and the last line of a node in the text that was parsed, from 1."""
    first = node.start_point[0] + 1
    return first, max(first, node.end_point[0] + (1 if node.end_point[1] else 0))


def shift_of(node: Node, text: str, line: int) -> int | None:
    """Return what to add to the lines of a `text` to have those of the script: it is the last word
    of `node`, and begins in `line`. None where the lines do not correspond."""
    last = node.named_children[-1]
    is_whole = source(last).count("\n") == text.count("\n") and line == last.start_point[0] + 1
    return line - 1 if is_whole and last.type in ("string", "raw_string") else None
