"""Secrets of a job script, which are neither written nor printed."""

from __future__ import annotations

import re
from itertools import chain, count

from hpc_ddp.core.job.variables import SECRET_NAME, URL_WITH_PASSWORD
from hpc_ddp.submission.job_script.conversion import LOST, Conversion

MARK = "a secret's value is not written: export {0} in your shell; as --env {0}"
# The beginning of a value that is no secret: a truth, a number, a path, code, or a placeholder.
_PLAIN = r"(?i:true|false|none|null|yes|no|offline|disabled|auto)\b|[\d.]+\b|[{$\"'<>/~\[|\\-]"
_NAME = rf"(?i:(?:{SECRET_NAME})(?:ORD|D|S)?)"  # to its end
_ENDS_IN_NAME = re.compile(rf"{_NAME}$")
# What services put before their tokens, and the address of a webhook, which is one.
_TOKEN = (
    r"\b(?:hf_[A-Za-z0-9]{16,}|(?:gh[oprsu]_|github_pat_|glpat-|npm_|sk-|xox[abprs]-)[\w-]{16,})"
    r"|\bAKIA\w{16}"
    r"|\bhooks\.slack\.com/\w+/\w|\bdiscord(?:app)?\.com/api/webhooks/\w"
)
_SCHEME = r"(?i:bearer|basic)\s+"  # of a header Authorization
_FORM = re.compile(
    rf"{_TOKEN}|\b[0-9a-f]{{40}}\b[^\n;]*\|\s*wandb\s+login|wandb\s+login[^\n;]*<<<\s*[\"']?\w{{16,}}"
    rf"|wandb[\s.]+login[\s(]+(?:--\w+[ =])*(?:key=)?[\"']?\w{{16,}}|{URL_WITH_PASSWORD}"
    # As in a command, a header, YAML, JSON, and ~/.netrc.
    rf"|(?P<name>\b\w*{_NAME}(?:=|[\"']?:\s*)|-[\w-]*{_NAME}(?:=|\s+)"
    rf"|\blogin\s+\S+\s+password\s+)[\"']?(?:{_SCHEME})?(?!{_PLAIN}|{_SCHEME})"
    r"(?P<content>[^\s\"']{4,})"
    # As in the short options of some commands, and on their standard input.
    rf"|\b(?:mysql\w*|mariadb\w*|sshpass)\b[^|;&]*\s-p\s*[\"']?(?!{_PLAIN})\S{{4,}}"
    rf"|\b(?:curl|wget)\b[^|;&]*\s(?:-u|--user)[\s=]*[\"']?[^\s:\"']+:(?!{_PLAIN})\S{{4,}}"
    rf"|{_NAME}\S*\s*<<<\s*[\"']?(?!{_PLAIN})\S{{4,}}"
)
# A name with "key", but not "api_key" and the like, may be that of a table: its value is a word.
_OF_A_TABLE = re.compile(r"(?i:(?!.*(?:api|access|private)).*key)[=:\s\"']*")
# The name of a model or a data set, as Qwen2.5-32B-Instruct: words, with numbers behind them.
_NAME_OF_THING = r"[A-Za-z]+(?:[\d.]{0,5}[_./-](?:[A-Za-z]+|[\d.]+[A-Za-z]?))+[\d.]{0,5}"
# Words of a language model are tokens: a name that goes on is a secret's by its value.
_OF_TOKENS = re.compile(
    r"(?i:(?!.*(?:secret|passw|key|auth)).*"
    r"(?:token_[a-z]\w*|(?:pad|[be]os|mask|unk|sep|cls|image|img|video|audio|start|end|stop)[_-]?token))"
    r"[=:\s\"']*"
)

# The name of a variable that holds a secret: a program may be told it in place of the value.
_OF_A_VARIABLE = re.compile(r"[A-Z][A-Z_]*_(TOKEN|KEY|SECRET|PASSWORD)")


def looks_secret(text: str) -> bool:
    """Return whether a line, or a value, has a secret in it by its form: ``--token=a1b2c3``, a
    service's token (``hf_…``), or ``https://user:a1b2c3@host``."""
    return any(
        not (match["name"] and _is_word(match["name"], match["content"]))
        for match in _FORM.finditer(text)
    )


def _is_word(name: str, content: str) -> bool:
    """Return whether a value, `content`, is no secret, though `name` looks like a secret's: a short
    word, or the name of a model, as the key of a table (``sort_key=id``) or a language model's
    token (``pad_token=eos``). The `name` may have a sign behind it, as ``=`` or ``:``."""
    is_table = _OF_A_TABLE.fullmatch(name) or _OF_TOKENS.fullmatch(name)
    first, *pieces = re.split("[,;]", content)  # of Key=Monitoring,Value=ON
    is_word = re.fullmatch(rf"[A-Za-z_.-]{{1,15}}|{_NAME_OF_THING}", first)
    return bool(is_table and is_word) and not any(map(looks_secret, pieces))


def is_secret(name: str, content: str | None = None) -> bool:
    """Return whether the value (`content`) of a variable or an option is a secret: it has the form
    of a secret, or the `name` is a secret's and the value no plain one, as a number or a path.
    Without `content` the name alone decides. ``API_KEY`` with ``a1b2c3`` is one, with ``/a/file``
    it is none. A default, ``${A:-a1b2c3}``, counts as the value."""
    is_named = bool(re.search(SECRET_NAME, name, re.I))
    if content is None:
        return is_named
    if default := re.fullmatch(r"\$\{\w+:?[-=](.+)\}", content):
        content = default[1]
    is_plain = not content or re.match(_PLAIN, content) or _is_word(name, content)
    return looks_secret(content) or (is_named and not is_plain)


def take_out_secrets(result: Conversion) -> None:
    """Remove the values of secrets from the arguments and variables of a conversion, in place.

    An argument gets ``$NAME`` in place of the value (`_choose_name`), and ``expand`` gets NAME; a
    secret variable is removed from ``env``. The name of a variable is no secret. ``env-names``,
    which is first sorted by its lines, gets the name of each secret, so that the user's shell
    passes the value on. The line with the value is marked as lost.
    """
    result.lists.get("env-names", []).sort(key=lambda entry: entry[1])
    contents = result.secrets | {name: text for name, (text, _) in result.env.items()}
    # Variables of set-up lines, whose names are taken: '' is no secret's value.
    for text, _ in result.lists.get("setup", ()):
        contents |= dict.fromkeys(re.findall(r"\b([A-Za-z_]\w*)=", text), "")
    before = ""
    for position, (text, line) in enumerate(result.lists.get("args", [])):
        option, content, is_inline = _split_argument(before, text)
        named_option = option if _ENDS_IN_NAME.search(option) else ""
        is_name = content in contents or _OF_A_VARIABLE.fullmatch(content)
        if is_secret(named_option, content) and not is_name:
            name = _choose_name(named_option, content, contents)
            hidden = f"{option}=${name}" if is_inline else f"${name}"
            result.lists["args"][position] = hidden, line
            result.append("expand", name, line)
            _leave_to_shell(result, name, line)
        before = text
    for name, (text, line) in [*result.env.items()]:
        if is_secret(name) or is_secret(name, text):
            del result.env[name]
            _leave_to_shell(result, name, line)


def _choose_name(option: str, content: str, contents: dict[str, str]) -> str:
    """Return a variable's name for a secret, and add it with the value, `content`, to `contents`,
    values by name: API_KEY for ``--api-key``, SECRET for the option ''. A number follows, as in
    API_KEY_2, where that name has another value."""
    name = re.sub(r"\W", "_", option.lstrip("-")).upper() if option else "SECRET"
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return next(n for n in names if contents.setdefault(n, content) == content)


def _split_argument(before: str, text: str) -> tuple[str, str, bool]:
    """Return the option, or key, that the argument `text` has a value of, '' for none; the value;
    and whether `text` has both. `before` is the argument in front of it.

    - ``--key=a`` and Hydra's ``key=a``: the name, "a" and True
    - "a" behind ``--key``: "--key", "a" and False; so is "a=b" behind ``--token``, as the value of
      an option that names a secret
    """
    name, _, inline = text.partition("=")
    is_value = before.startswith("-") and "=" not in before and _ENDS_IN_NAME.search(before)
    if inline and (text.startswith("-") or (not is_value and re.fullmatch(r"[\w.+/-]+", name))):
        return name, inline, True
    return before if before.startswith("-") else "", text, False


def _leave_to_shell(result: Conversion, name: str, line: int) -> None:
    """Add the `name` of a secret's variable to ``env-names``, by which hpc-ddp passes on the value
    of the user's shell, and mark the `line` that has the value as lost."""
    result.append("env-names", name, line)
    result.mark(line, line, LOST, MARK.format(name))
