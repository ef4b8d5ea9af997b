"""The syntax tree of a job script, and searches in it and in its code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.submission.job_script.bash.here_documents import for_parser
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts

Node = Any  # a tree_sitter.Node: the package is optional
Span = tuple[int, int]  # the first byte, and the one behind the last
# A placeholder, <yours>, as a word or behind an option's =; but not a redirection, which has a word
# behind it: sort <a> b.
_PLACEHOLDER = re.compile(
    rb"(?m)(?<!\S)<[A-Za-z][\w .-]*>(?=[ \t]*(?:$|#|\\\n|<[A-Za-z])|[ \t]+-|[:/]\S)"
    rb"|(?<==)<[A-Za-z][\w .-]*>(?=\s|$|[/:$\w])|(?<=[\w/])<[A-Za-z][\w .-]*>(?=/)"
    rb"|(?<=/)<[A-Za-z][\w-]*>(?=[\s.\w]|$)"
    rb"|(?<==)[ \t]*#[ \t]*<[A-Za-z][\w .-]*>(?=[ \t]*$)"  # A=# <B>, also a comment
)
# A template's ${{NAME}}, which bash can't expand, in double quotes; <{{NAME}> stands for it.
_QUOTED, _TEMPLATE = re.compile(r'"[^"\n]*"'), re.compile(r"\$(\{\{[\w. -]+\})\}")
_OF_TEMPLATE = re.compile(rb"<(\{\{[\w. -]+\})>")
# Arguments of the script or a function: those without a default; all of them together.
_ARGUMENTS = re.compile(r"(?<!\\)\$(?:[1-9@*#]|\{(?:[1-9@*](?!:?-)[^}]*|#)\})")
ALL_ARGUMENTS = re.compile(r"(?<!\\)\$(?:[@*]|\{[@*](?::\s*[1-9]\d*(?::\d+)?)?\})")
# A piece of a word; and the rest of a word behind a line's end (a backslash) within it.
_CHUNK = rb"""(?:\$\([^()]*\)|[^\s\\"'`;&|()<>]|"(?:\\.|[^"\\])*"|'[^'\n]*'|\\[^\n])+"""
_BROKEN_WORD = re.compile(rb"(?:(?:\\\n)+%b)+" % _CHUNK, re.S)
# Types of nodes that may be a piece of a word; and of those whose code is text.
_OF_WORDS = ("word", "string", "raw_string", "concatenation", "number", "command_name", "=",
             "simple_expansion", "expansion", "command_substitution")  # fmt: skip
_BARE_TEXT = re.compile(rb"[ \t]*<<[^<]")  # a here-document that has no command
_KEPT = ("heredoc_body", "raw_string")
_IN_TEXT = ("string", "heredoc_body", "simple_expansion", "expansion")


def parse(text: str) -> Node:
    """Return the root of the syntax tree of a bash script, `text`. The tree's text differs a little
    from the script's, while lines keep their numbers: a placeholder, ``=<name>``, has quotes, and
    see `for_parser` and `_with_whole_words`. Raise UsageError where the parser of bash, or
    that of YAML, is not installed."""
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
    parser, parsed = tree_sitter.Parser(language), b""
    text = re.sub(r"(\\(\n|$)\s*)+$", "", text) + "\n"  # a backslash at the script's end
    text = _space_brackets(for_parser(_QUOTED.sub(lambda m: _TEMPLATE.sub(r"<\1>", m[0]), text)))
    code = _quote_placeholders(parser.parse(text.encode()).root_node, text.encode())
    while code != parsed:  # a change lets the parser see others
        root, parsed = parser.parse(code).root_node, code
        code = _with_whole_words(root, code)
    return root


def _space_brackets(text: str) -> str:
    """Return a script with a blank in each ``$(((``, which the parser reads as another expansion:
    ``$(( (A+1)*2))`` in arithmetic, and ``$( ((A)) && echo 1)`` in a command, of which the first
    two brackets do not end together."""
    pieces, end = [], 0
    for match in re.finditer(r"\$\(\(\(", text):
        depth, closed = 0, []  # of the brackets where the second ends first, the first last
        for index in range(match.start() + 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[index], 0)
            if text[index] == ")" and depth < 2:
                closed.append(index)
            if not depth:
                break
        is_arithmetic = len(closed) < 2 or closed[0] + 1 == closed[-1]
        pieces += [text[end : match.start()], "$(( (" if is_arithmetic else "$( (("]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _quote_placeholders(root: Node, code: bytes) -> bytes:
    """Return a script's `code` with quotes around each placeholder: ``--name '<yours>'`` for
    ``--name <yours>``, which bash would read as a redirection. Those in quotes, in here-documents
    and in ``${…}`` stay as they are. In single quotes and here-documents ``<{{a}>`` is a template's
    text again, which has as many bytes. `root` is the tree of the code."""
    nodes = [node for node in all_below(root) if node.type in (*_IN_TEXT, "raw_string")]
    texts = [range(node.start_byte, node.end_byte) for node in nodes]
    for start, end in ((node.start_byte, node.end_byte) for node in nodes if node.type in _KEPT):
        code = code[:start] + _OF_TEMPLATE.sub(rb"$\1}", code[start:end]) + code[end:]
    return _PLACEHOLDER.sub(
        lambda m: (
            m[0] if any(m.start() in text for text in texts) else b"'%b'" % m[0].lstrip(b"# \t")
        ),
        code,
    )


def _with_whole_words(root: Node, code: bytes) -> bytes:
    """Return a script's `code`, changed where tree-sitter-bash 0.25 reads it otherwise than bash,
    without an error. The result has to be parsed and given to this function again, until nothing
    changes. `root` is the tree of the code.

    First come the changes of `_edits_at`. Where there are none, a line's end within a word moves
    behind the word, with a blank: ``a\\<newline>b`` becomes ``ab \\<newline>``.
    """
    nodes, edits = [*root.children], dict[Span, bytes]()
    breaks: dict[int, int] = {}  # where a word with broken lines begins, by where it ends
    while nodes:
        node = nodes.pop()
        nodes += node.children
        edits |= _edits_at(node, code)
        if broken := _rest_of_broken_word(node, code):
            breaks[broken.end()] = min(broken.start(), breaks.get(broken.end(), len(code)))
    if not edits:
        for end, start in breaks.items():
            lines = code[start:end].count(b"\\\n")
            edits[start, end] = code[start:end].replace(b"\\\n", b"") + b" " + b"\\\n" * lines
    for (start, end), new in sorted(edits.items(), reverse=True):  # from the end: offsets hold
        code = code[:start] + new + code[end:]
    return code


def _edits_at(node: Node, code: bytes) -> dict[Span, bytes]:
    """Return the new texts, by the span of bytes in `code` that each replaces, which make the
    parser read the code at a node as bash does."""
    edits: dict[Span, bytes] = {}
    line_start, after = code.rfind(b"\n", 0, node.start_byte) + 1, node.next_sibling
    # << behind no command becomes : <<
    if node.type == "<" and _BARE_TEXT.fullmatch(code[line_start : node.start_byte + 3]):
        edits[line_start, line_start] = b": "
    # A line of assignments gets a ; at its end: they are no variables of the next line's command.
    if node.type == "variable_assignment" and node.parent.type == "command" and after:
        between = code[node.end_byte : after.start_byte].replace(b"\\\n", b"")
        if b"\n" in between or after.type == "comment":
            edits[node.end_byte, node.end_byte] = b";"
    # $NAME of which the parser sees the $ alone becomes ${NAME}.
    name = re.compile(rb"[A-Za-z_]\w*|\d").match(code, node.end_byte)
    if name and node.type == "$" and node.parent.type != "simple_expansion":
        edits[name.span()] = b"{%b}" % name[0]
    # \x behind a node, up to the next one, becomes 'x'. The next one may begin with \x itself: its
    # two bytes are searched, too, except behind the end of a group or a substitution.
    end = after.start_byte if after else node.parent.end_byte
    end = max(end, node.end_byte + 2) if node.type not in (")", "))", "`") else end
    if node.parent.type not in _IN_TEXT:
        for escaped in re.compile(rb"\\([\t -&(-~])").finditer(code, node.end_byte, end):
            edits[escaped.span()] = b"'%b'" % escaped[1]
    # a.out > log b becomes a.out b > log: tree-sitter takes b for a second file.
    words = [child for child in node.named_children if child.type != "file_descriptor"]
    has_document = node.parent and b"<<" in node.parent.text  # whose lines stay where they are
    # Without a blank between them it is one word, of which the parser has not seen a $NAME.
    is_more = len(words) > 1 and code[words[1].start_byte - 1 : words[1].start_byte].isspace()
    if node.type == "file_redirect" and is_more and not has_document:
        redirect = code[node.start_byte : words[1].start_byte]
        edits[node.start_byte, words[1].start_byte] = b"\\\n" * redirect.count(b"\\\n")
        edits[node.end_byte, node.end_byte] = b" " + redirect.replace(b"\\\n", b" ").rstrip()
    # $NAME with a line's end behind it, which the parser takes for a part of NAME, becomes ${NAME}.
    is_of_expansion = node.type == "variable_name" and node.parent.type == "simple_expansion"
    variable = re.match(rb"(\w+)(?:\\\n)+$", node.text) if is_of_expansion else None
    if variable:
        edits[node.start_byte, node.start_byte + len(variable[1])] = b"{%b}" % variable[1]
    # `pwd` within a word, which the parser ends there, becomes $(pwd).
    span = node.start_byte, node.end_byte
    if node.type == "command_substitution" and node.text[:1] == b"`" and b"\\" not in node.text:
        around = code[max(0, span[0] - 1) : span[0]] + code[span[1] : span[1] + 1]
        if node.parent.type not in _IN_TEXT and re.search(rb"[\w,:/.-]", around):
            edits[span] = b"$(%b)" % node.text[1:-1]
    return edits


def _rest_of_broken_word(node: Node, code: bytes) -> re.Match[bytes] | None:
    """Return what follows in `code` of the word that begins with a node: a backslash, the line's
    end, and more of the word, once or several times. None where the word goes on in no other
    line."""
    if node.type not in _OF_WORDS or node.parent.type in _IN_TEXT:
        return None
    # A node that has a blank at its end is a whole word.
    is_end = re.search(rb"(?<!\\)\s$", code[max(0, node.end_byte - 2) : node.end_byte])
    return None if is_end else _BROKEN_WORD.match(code, node.end_byte)


def source(node: Node) -> str:
    """Return the code that a node stands for, as in the tree; '' for None."""
    return "" if node is None else node.text.decode()


def uses_arguments(text: str, are_none: bool = False) -> bool:
    """Return whether bash code, `text`, uses the arguments of its script or function: ``$1``,
    ``$@``, ``$*`` or ``$#``. Those with a default (``${1:-x}``) do not count; nor do those of
    functions that the code defines, and of awk or Python, in single quotes; nor, where the script
    gets no arguments (`are_none`), ``$@`` and ``$*``, which are then nothing."""
    code = without_quoted_texts(text)
    uses = _ARGUMENTS.search(ALL_ARGUMENTS.sub("", code) if are_none else code)
    if uses and re.search(r"\(\)|\bfunction\s", code):  # a function's body has its own
        root = parse(text)
        if functions := functions_in(root):
            code = source(root)
            for node in functions:
                code = code.replace(source(node), " ", 1)
            return uses_arguments(code, are_none)
    return bool(uses)


def commands_of(node: Node) -> list[Node]:
    """Return all simple commands in a node, in the script's order; the node itself is the first if
    it is one. Commands in substitutions, ``$(…)``, are left out."""
    return [inner for inner in descend(node) if inner.type == "command"]


def body_of(node: Node) -> Node:
    """Return the body of a function or of a ``for``; any other node itself, also a ``while`` or
    ``until``, whose condition is searched for launches, too."""
    body = None if node.type == "while_statement" else node.child_by_field_name("body")
    return body or node


def names_needed(text: str, name: str) -> set[str]:
    """Return the variables and functions that a statement's `text` may need; some other words may
    be among them.

    `name` is the variable that the statement sets or exports, '' for none. It counts only if the
    text uses it: by its value, or as the bare word of ``export A``.

    - ``A=$B`` with "A": {"B"}
    - ``A=$A:x`` with "A": {"A"}, and ``A``, of ``export A``, with "A": {"A"}
    - ``trap 'f' EXIT`` with "": {"f"}, which may be a function
    """
    is_trap = text.startswith("trap")  # it runs the text in its quotes
    text = re.sub("[\"']", " ", text) if is_trap else without_quoted_texts(text)
    # Words in a command's place, which may be functions: behind ; do or the pattern of a case, say.
    before = r"(?:trap(?:\s+--)?|then|do|else|elif|if|while|until|time)\b"
    called = re.findall(
        rf"(?:^|[;&|({{`!\n]|\b{before}|[;\n]\s*[\w*?|.-]+\))\s*(?!{before})([A-Za-z_]\w*)", text
    )
    exported = text.split()[2:] if text.startswith("export -f") else []
    names = {*names_in(text), *called, *exported}
    uses_name = name == text or re.search(rf"\$\{{?{name}\b", text)
    return names if uses_name else names - {name}


def is_pattern(node: Node) -> bool:
    """Return whether bash makes other words of a word that stands in no quotes: names of files, as
    of ``*.py`` and ``[ab].py``, or those that ``{a,b}`` and ``{1..3}`` stand for. A ``*`` or ``?``
    counts only in a word that is one node, without variables or quoted parts."""
    if node.type not in ("word", "concatenation"):
        return False
    text = re.sub(r"'[^']*'|\"(\\.|[^\"\\])*\"|\$\{[^}]*\}", "", source(node))  # its unquoted text
    has_star = not node.named_children and re.search(r"(?<!\\)[*?]", text)
    # A list as Hydra's layers=[1,2] is no set of letters.
    has_set = re.search(r"(?<![\\=])\[[^],\s]+\]", text)
    has_braces = re.search(r"(?<![$\\])\{[^{}\s]*(,|\.\.)[^{}\s]*\}", text)
    return bool(has_star or has_set or has_braces)


def names_in(code: str) -> list[str]:
    """Return the variables that bash code mentions, once for each mention; those of arithmetic, as
    B of ``$((B+1)) $A``, come last. Texts in quotes are searched as well."""
    arithmetic = " ".join(re.findall(r"\(\((.*?)\)\)", code, re.S))
    return re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", code) + re.findall(r"[A-Za-z_]\w*", arithmetic)


def redirected_command(node: Node) -> Node:
    """Return the command or block that a node redirects, as ``a.out`` of ``a.out > file``; a node
    without a redirection itself."""
    while node.type == "redirected_statement":
        node = node.named_children[0]
    return node


def target_of(node: Node) -> str:
    """Return the first file that a pipeline or a command with redirections writes to, by ``>``,
    ``>>``, ``2>`` or ``tee``, as it is written there. Without a file: "a pipe" for a pipeline, else
    ''."""
    targets = re.findall(r"(?:>>?|\btee (?:-a )?)\s*([^\s&|;>]+)", source(node))
    default = "a pipe" if node.type == "pipeline" else ""
    return next((target for target in targets if target != "1"), default)  # 2>1 is meant as 2>&1


def files_written(text: str) -> set[str]:
    """Return the files that bash code, `text`, writes by ``>``, ``>>`` or ``tee``, but for those in
    ``/dev``. Quotes, ``./`` or ``$PWD/`` before a path, and the braces of variables are left out:
    ``> "./${A}.txt"`` has ``$A.txt``. Raise as `parse`."""
    nodes = [*descend(parse(text))]
    texts = [source(node) for node in nodes if node.type == "file_redirect"]
    words = [re.fullmatch(r"1?>>?\s*([\"']?)([^&\s]+?)\1", redirect) for redirect in texts]
    words += [re.fullmatch(r"tee\s+(?:-a\s+)?([\"']?)(\S+?)\1", source(node)) for node in nodes]
    files = {re.sub(r"\$\{(\w+)\}", r"$\1", word[2]) for word in words if word}
    return {re.sub(r"^(\.|\$PWD)/", "", file) for file in files if not file.startswith("/dev/")}


def reads_input(node: Node, command: Node) -> bool:
    """Return whether `command` reads another command's output, a file or a text on its standard
    input: ``a | command``, ``command < file``, ``command <<EOT``. `node` is the pipeline or the
    redirection around the command, or the command itself."""
    is_first = node.type != "pipeline" or commands_of(node)[0].start_byte == command.start_byte
    kinds = ("heredoc_redirect", "herestring_redirect")
    return not is_first or any(
        inner.type in kinds or (inner.type == "file_redirect" and source(inner)[0] == "<")
        for inner in descend(node)
    )


def all_below(node: Node) -> Iterator[Node]:
    """Yield a node and all named nodes below it, in the script's order, each before those in it."""
    yield node
    for child in node.named_children:
        yield from all_below(child)


def functions_in(node: Node) -> list[Node]:
    """Return the definitions of functions in a node, in the script's order."""
    return [inner for inner in all_below(node) if inner.type == "function_definition"]


def descend(node: Node) -> Iterator[Node]:
    """Yield a node and the named nodes below it, as `all_below`. Left out, with all below them, are
    substitutions (``$(…)``), and assignments for one command alone, as ``A=1 a.out``."""
    yield node
    is_named = node.type == "command" and node.child_by_field_name("name") is not None
    for child in node.named_children:
        is_prefix = is_named and child.type == "variable_assignment"
        if child.type not in ("command_substitution", "process_substitution") and not is_prefix:
            yield from descend(child)


def lines_of(node: Node) -> tuple[int, int]:
    """Return the first and the last line of a node in the text that was parsed, from 1."""
    first = node.start_point[0] + 1
    # A node that ends in column 0 has nothing of that line.
    return first, max(first, node.end_point[0] + (1 if node.end_point[1] else 0))


def shift_of(node: Node, text: str, line: int) -> int | None:
    """Return the number to add to a line of `text` to get that line's number in the script. `text`
    is the value of the last word of the command `node`, as of ``bash -c '…'``; `line` is the
    script's line with its beginning. None where the word is no single text in quotes, or has other
    lines than the text, as with a variable in it."""
    last_word = node.named_children[-1]
    has_same_lines = source(last_word).count("\n") == text.count("\n")
    is_whole = has_same_lines and line == last_word.start_point[0] + 1
    return line - 1 if is_whole and last_word.type in ("string", "raw_string") else None
