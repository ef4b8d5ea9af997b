"""The texts that commands of a script write into files: a configuration, say, that the launch
reads."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections import Counter
from dataclasses import replace

from hpc_ddp.submission.job_script.bash.counts import whole_number
from hpc_ddp.submission.job_script.bash.here_documents import as_quoted
from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
    all_below,
    parse,
    redirected_command,
    source,
)
from hpc_ddp.submission.job_script.bash.values import text_of
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Part, Word, literal

# Commands that do not change the files that they name.
_READING = re.compile(r"echo|printf|cat|head|tail|ls|wc|chmod|grep|stat|test|mkdir|touch")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
# Commands that fail in no script that goes on as it is meant to.
_SUCCEEDS = re.compile(r"(mkdir|cd|echo|printf|cat|tee|touch|rm|cp|export|module|source|set|\.)\s")
# Commands that change what is below a folder: each that they name, or the last one alone.
_CHANGES_FOLDERS = ("rm", "mv")
_CHANGES_LAST_FOLDER = ("cp", "rsync", "install", "ln")
# Code in a word whose text is not known: variables, substitutions, and names in braces.
_CODE = re.compile(r"\$\w+|\$\{[^{}]*\}|\$\([^()]*\)|`[^`]*`|\{[^{}]*\}")
_ANY_FOLDER = "*"  # a path begins with it where only the job knows the folder
# The operator of a redirection of the output.
_WRITES = re.compile(r"[1&]?(>>?)\|?\s*(?!&)")


def path_of(word: Word, folder: str | None) -> str:
    """Return the path of a file that `word` names, as seen from a `folder`; None or '' for one that
    is not known."""
    return os.path.normpath(os.path.join(folder or "", os.path.expanduser(word.text)))


def write_texts(node: Node, scope: Scope, texts: dict[str, str]) -> None:
    """Change `texts`, those of files by their paths (`path_of`), as a statement, `node`, changes
    the files; a file whose text is not known afterwards is removed. In a text stands a number for
    code that has one by the `scope`, while other code stays: ``num_machines: 2``, but
    ``machine_rank: ${SLURM_PROCID}``."""
    # What the words set, and take to be unset, counts where the statement itself is read.
    scope = replace(scope, values={**scope.values}, versions=Counter(), defaults=set())
    _Writer(scope, texts).output_of(node, None)


def _may_end(text: str) -> bool:
    """Return whether a list of commands, `text`, may end before its last command: it has a ``||``,
    or a command before ``&&`` that may fail, as a test."""
    return "||" in text or not all(
        _SUCCEEDS.match(command.strip()) for command in text.split("&&")[:-1]
    )


class _Writer:
    """Follows commands, with the variables of `scope`, and writes into `texts`, by path, what they
    write into files.

    A method that is named after a type of node, as ``_pipeline``, does so for such a node: it gets
    the text that the node reads on its standard input, `stdin`, and returns the text that the node
    prints. None stands for a text that is not known.
    """

    def __init__(self, scope: Scope, texts: dict[str, str]) -> None:
        self._scope, self._texts = scope, texts
        self._folder = text_of(scope.values.get("PWD"))  # '' where it is not known

    def output_of(self, node: Node, stdin: str | None) -> str | None:
        """Follow a node, and return what it prints, None where that is not known.

        A node without a method here, as ``if`` or ``for``, and a list that may end early
        (`_may_end`) may run its commands or not. The files that these may write are then removed
        from the texts, and the result is None.
        """
        method, body = getattr(self, f"_{node.type}", None), redirected_command(node)
        if method and not (body.type == "list" and _may_end(source(body))):
            return method(node, stdin)  # type: ignore[no-any-return]
        if re.search(r"\b(cd|pushd|popd)\s", source(node)):
            self._move_to(_ANY_FOLDER)
        for inner in all_below(node):
            if inner.type == "command":
                self._forget(self._scope.words(inner.named_children))
            elif inner.type == "file_redirect":
                self._redirect(inner, None)
        return None

    def _pipeline(self, node: Node, stdin: str | None) -> str | None:
        """Follow the commands of a pipeline, each of which reads the output of the one before."""
        folder = self._folder
        for child in node.named_children:
            stdin = self.output_of(child, stdin)
        self._move_to(folder)  # a cd in a pipeline changes no other command's
        return stdin

    def _subshell(self, node: Node, stdin: str | None) -> str | None:
        """Follow the commands in ``( … )``, whose folder ends with it."""
        folder = self._folder
        output = self._list(node, stdin)
        self._move_to(folder)
        return output

    def _list(self, node: Node, stdin: str | None) -> str | None:
        """Follow commands one by one, and return their outputs, joined."""
        outputs = [self.output_of(child, stdin) for child in node.named_children]
        return None if None in outputs else "".join(map(str, outputs))

    _compound_statement = _list

    def _comment(self, node: Node, stdin: str | None) -> str:
        """Return the output of a comment: nothing."""
        return ""

    def _redirected_statement(self, node: Node, stdin: str | None) -> str | None:
        """Follow a command or block with redirections of its input or output."""
        body, *redirects = node.named_children
        # tree-sitter has what stands behind <<EOT in that node.
        redirects += [r for document in redirects for r in document.named_children]
        for redirect in redirects:
            if redirect.type == "heredoc_redirect":
                stdin = self._document(redirect)
            elif redirect.type == "file_redirect" and source(redirect)[:1] == "<":
                stdin = None
        if body.type == "list":  # of which the last command is redirected
            self.output_of(body.named_children[0], None)
            body = body.named_children[-1]
        output = self.output_of(body, stdin)
        for redirect in redirects:
            if redirect.type == "pipeline":
                output = self._pipeline(redirect, output)
            elif redirect.type == "file_redirect":
                output = self._redirect(redirect, output)
        return output

    def _redirect(self, node: Node, output: str | None) -> str | None:
        """Write a command's `output` into the file of a redirection, and return '', which is left
        of it. A redirection of the input or of errors writes nothing; then return `output`."""
        operator = _WRITES.match(source(node))
        if operator is None:
            return output
        self._write(self._scope.word(node.named_children[-1]), output, operator[1] == ">>")
        return ""

    def _write(self, file: Word, text: str | None, is_added: bool) -> None:
        """Set the text of a file that `text` is written into, behind the text in it if it
        `is_added`; remove it where one of both is not known. In a folder that is not known, remove
        the texts of all files that it may be."""
        if self._folder == _ANY_FOLDER and not path_of(file, "").startswith("/"):
            self._remove(self._paths_of(file))
            return
        path = path_of(file, self._folder)
        before = self._texts.pop(path, None if is_added else "")
        if path[0] not in "/$~":  # it may be another file whose folder is known
            self._remove(self._paths_of(file))
        # A file that was there before has a text that is not known.
        is_known = text is not None and before is not None
        if is_known and not path.startswith("/dev/"):
            self._texts[path] = f"{before}{text}" if is_added else f"{text}"

    def _command(self, node: Node, stdin: str | None) -> str | None:
        """Follow a simple command: return what it prints, None where that is not known.

        ``tee`` writes into the texts, ``rm`` empties them, ``cd`` changes the folder. Any other
        command removes the texts of the files that it may change (`_forget`).
        """
        nodes = []
        for child in node.named_children:
            if child.type == "herestring_redirect":
                stdin = self._fill_in(self._scope.word(child.named_children[0])) + "\n"
            elif child.type != "variable_assignment":
                nodes.append(child)
        words = self._scope.words(nodes)
        texts = [self._fill_in(word) for word in words[1:]]
        name = words[0].text if words else ""
        if name in ("cd", "pushd", "popd"):
            self._move_to(self._folder_of_move(words))
            return ""
        if name == "echo":
            return _echo(texts)
        if name == "printf" and texts:
            return _printf(*texts)
        if name == "cat" and not texts:
            return stdin
        if name == "tee":
            for file in (word for word in words[1:] if word.text[:1] != "-"):
                self._write(file, stdin, "-a" in texts)
            return stdin
        paths = self._forget(words)
        if name == "rm":  # what is added later is the whole text
            files = [word for word in words[1:] if word.is_static and word.text[:1] != "-"]
            is_known = self._folder != _ANY_FOLDER
            paths |= {path_of(word, self._folder) for word in files if is_known}
            self._texts |= dict.fromkeys(paths, "")
        return "" if name in (":", "true") else None

    def _move_to(self, folder: str) -> None:
        """Set the folder of the commands that follow, and PWD to it: '' and `_ANY_FOLDER` stand for
        one that is not known."""
        self._folder = folder
        is_known = folder not in ("", _ANY_FOLDER)
        self._scope.values["PWD"] = literal(folder) if is_known else None

    def _folder_of_move(self, words: list[Word]) -> str:
        """Return the folder to which a ``cd`` or ``pushd`` of `words` leads; `_ANY_FOLDER` where it
        is not known, as for ``cd -`` and ``popd``."""
        path = path_of(words[1], "") if len(words) == 2 and words[1].is_static else "-"
        is_known = path[0] != "-" and (path[0] == "/" or self._folder != _ANY_FOLDER)
        return os.path.normpath(os.path.join(self._folder, path)) if is_known else _ANY_FOLDER

    def _forget(self, words: list[Word]) -> set[str]:
        """Remove the texts of the files that a command of `words` may change, and return their
        paths. These are the files that it names, also by patterns, unless it only reads them
        (`_READING`), and those below the folders that it removes, moves or copies to. A word that
        is a variable alone names no file, but for a command that edits files (``sed -i``)."""
        name = words[0].text if words else ""
        if not words or _READING.fullmatch(name):
            return set()
        edits = name in ("sed", "perl") and any(re.match(r"-\w*i", w.text) for w in words[1:])
        folders = words[1:] if name in _CHANGES_FOLDERS else []
        folders = words[-1:] if name in _CHANGES_LAST_FOLDER else folders
        paths = set[str]()
        for word in words[1:]:
            paths |= self._paths_of(word, edits, word in folders)
        self._remove(paths)
        return paths

    def _remove(self, paths: set[str]) -> None:
        """Remove the texts of the files at some paths."""
        for path in paths:
            del self._texts[path]

    def _paths_of(self, word: Word, edits: bool = False, is_folder: bool = False) -> set[str]:
        """Return the paths of those files with a text that a word of a command may name: by itself,
        behind the ``=`` of an option, by a pattern; with `is_folder` also those below a folder of
        this name. Code whose value is not known may be any text; a word that has nothing else names
        files only with `edits`."""
        code = re.sub(r"^-[\w-]*=?", "", word.text) if word.text[:1] == "-" else word.text
        text = re.sub(r"\$\{?(\w+)\}?", self._value_of, code)
        is_any = _CODE.search(text) and not re.search(r"\w", _CODE.sub("", text))
        if not text:
            return set()
        forms = [glob.escape(path_of(literal(code), self._folder))]
        forms += self._patterns_of(text, bool(word.code)) if edits or not is_any else []
        forms += [f"{form}/*" for form in forms] if is_folder else []
        return {p for p in self._texts if any(fnmatch.fnmatchcase(p, form) for form in forms)}

    def _patterns_of(self, text: str, has_code: bool) -> list[str]:
        """Return patterns, as of `fnmatch`, of the paths that a word's `text` may name. Code in it,
        and a ``*``, stand for any text if the word `has_code`; else all letters stand for
        themselves. A relative path may be seen from a folder that is not known."""
        pattern = os.path.expanduser(_CODE.sub("*", text) if has_code else glob.escape(text))
        if self._folder != _ANY_FOLDER and not _CODE.match(text):
            pattern = os.path.join(glob.escape(self._folder), pattern)
        pattern = os.path.normpath(pattern)
        if pattern[0] == "/":
            return [pattern]
        end = re.sub(r"^(?:(?:\.\.|\*)/)+", "", pattern)  # seen from a folder that is not known
        return [pattern, end, f"*/{end}"]

    def _value_of(self, match: re.Match[str]) -> str:
        """Return the value of a variable, [1] of a match, if that is one known text; else all that
        was matched."""
        assigned = self._scope.values.get(match[1])
        return assigned.text if isinstance(assigned, Word) and assigned.is_static else match[0]

    def _document(self, node: Node) -> str:
        """Return the text of a here-document, `node`, with values in it as bash fills them in
        unless its word has quotes. Behind ``<<-`` lines lose their tabs."""
        parts = {child.type: source(child) for child in node.children}
        text = parts.get("heredoc_body", "")
        if source(node).startswith("<<-"):
            text = re.sub(r"^\t+", "", text, flags=re.M)
        if parts["heredoc_start"][:1] in "\"'\\":
            return text
        assignment = parse(f"X={as_quoted(text)}").named_children[0]
        return self._fill_in(self._scope.word(assignment.child_by_field_name("value")))

    def _fill_in(self, word: Word) -> str:
        """Return a word's text, with a number in place of code that has one; other code stays."""
        numbers = [
            (p, whole_number(Word((p,)), self._scope) if p.is_code else None) for p in word.parts
        ]
        parts = (p if number is None else Part(str(number)) for p, number in numbers)
        return replace(word, parts=tuple(parts)).script.replace("\\\n", "")


def _echo(texts: list[str]) -> str | None:
    """Return what ``echo`` prints for its arguments, `texts`; None for a rare escape with ``-e``.
    Options are removed from `texts`."""
    options = ""
    while texts and re.fullmatch("-[neE]+", texts[0]):
        options += texts.pop(0)
    text = " ".join(texts)
    end = "" if "n" in options else "\n"
    text_read = _unescape(text) if "e" in options else text
    return None if text_read is None else text_read + end


def _printf(form: str, *arguments: str) -> str | None:
    """Return what ``printf`` prints: its `form` again and again, until all `arguments` are used.
    None for rare escapes, conversions other than %s, %d and %i, and options."""
    pieces = re.split(r"%([sdi%])", form)
    text, remaining = "", list(arguments)
    if form[:1] == "-" or any("%" in piece for piece in pieces[::2]):
        return None
    while True:
        for literal_text, conversion in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            unescaped = _unescape(literal_text)
            if unescaped is None:
                return None
            text += unescaped + ("%" if conversion == "%" else "")
            if conversion in ("s", "d", "i"):
                argument = remaining.pop(0) if remaining else "" if conversion == "s" else "0"
                if conversion != "s" and not re.fullmatch(r"0|-?[1-9]\d*", argument):
                    return None
                text += argument
        if not remaining or not {"s", "d", "i"} & {*pieces[1::2]}:
            return text


def _unescape(text: str) -> str | None:
    """Return a text with the characters that its escapes stand for; None for a rare escape."""
    if any(sign not in _ESCAPES for sign in re.findall(r"\\(.?)", re.sub(r"\\\\", "", text), re.S)):
        return None
    return re.sub(r"\\(.)", lambda m: _ESCAPES[m[1]], text)
