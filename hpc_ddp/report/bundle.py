"""One archive for a support ticket: a run's logs and settings, without secrets or checkpoints."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hpc_ddp import __version__, slurm
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import open_data, read_text
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.variables import SECRET_NAME, URL_WITH_PASSWORD
from hpc_ddp.core.run_folder import RunFolder

LOG_BYTES = 2**20  # of the end of each log
TOTAL_BYTES = 100 * 2**20
FOLDERS = ("journal", "logs")
# Names of files that are left out: flight recorders, which are no text; the secret with which an
# attempt's agents sign; and hidden files, as drafts and the environment of the batch script.
LEFT_OUT = re.compile(r"flight-rank-.*|secret|\..*")
JOB_FILES = ("job.json", "job.sbatch")
REDACTED = "[redacted]"

_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"',;&|)}\]])+"""
# In a script a value may have line breaks, be a list, and have a space behind a backslash.
_LONG_VALUE = r"""(?:"[^"]*"|'[^']*'|\([^)]*\)|\\.|[^\s"';&|])+"""
_QUOTE = r"""\\*["']?"""  # behind a name of JSON, which may stand in a string of JSON
# Secrets in any text; group 1 of a match is kept, the rest is the secret. The length of a name is
# bounded: in a long line of dashes each dash could begin a name.
_SECRETS = (
    re.compile(rf"((?:{SECRET_NAME})[\w-]{{0,99}}{_QUOTE}\s*[=:]\s*)(?:Bearer )?{_VALUE}", re.I),
    re.compile(
        rf"((?<![\w-])--[\w-]{{0,99}}(?:{SECRET_NAME})[\w-]{{0,99}}\s+)(?!--){_VALUE}", re.I
    ),
    re.compile(URL_WITH_PASSWORD),
    re.compile(r"""((?:authorization|cookie):[ \t]*)[^\s"'\\][^\n"'\\]*""", re.I),  # a header
)
_EXPORT = re.compile(r"\b(?:export|setenv)\s+([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"(?<![\w-])([A-Za-z_]\w*)\+?=")


class Redaction:
    """Replaces secrets in the texts of a run.

    A value is replaced behind a name (``TOKEN=abc`` becomes ``TOKEN=[redacted]``) that is one of
    the job's environment variables, a variable that its set-up and tear-down lines set, or a name
    like that of a secret; further passwords in URLs, and headers with a login or cookies.

    Some texts of 8 characters or more are replaced wherever they stand: secrets in the job, and the
    values of the user's variables (`environ`) that are named like a secret or that the job passes
    on.
    """

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        lines = "\n".join((*spec.setup, *spec.teardown))
        names = {*spec.env, *spec.env_names, *_EXPORT.findall(lines), *_ASSIGNMENT.findall(lines)}
        any_name = rf"\b(?:{'|'.join(map(re.escape, names)) or '(?!)'})"  # (?!) matches nothing
        self._in_script = re.compile(rf"({any_name}\+?=){_LONG_VALUE}")
        self._in_log = re.compile(rf"""({any_name}(?:=|\\*["']\s*[=:]\s*)){_VALUE}""")
        # A log may show a secret of the user's shell, or of the job's arguments, under any name.
        values = {
            secret for name, secret in environ.items() if name in spec.env_names or _is_secret(name)
        }
        values |= {*_secrets_in(json.loads(spec.to_json()), "")}
        # The longest first: one secret may be a part of another.
        self._values = sorted((s for s in values if len(s) >= 8), key=len, reverse=True)

    def redact_file(self, text: str, suffix: str) -> str:
        """Return the redacted text of a file. Its suffix decides: ``.json``, ``.jsonl`` (JSON line
        by line), ``.sbatch`` (a script), any other (a log). JSON is formatted anew; a file or line
        of broken JSON is replaced as a whole."""
        if suffix == ".json":
            return self._redact_json(text, indent=1)
        if suffix == ".jsonl":
            return "\n".join(self._redact_json(line) for line in text.splitlines())
        return self._redact_text(text, is_script=suffix == ".sbatch")

    def _redact_json(self, text: str, indent: int | None = None) -> str:
        """Return a JSON text redacted, with the `indent` of `json.dumps` (None: on one line); a
        broken text is replaced as a whole."""
        try:
            return json.dumps(self._redact_content(json.loads(text), ""), indent=indent)
        except (ValueError, RecursionError):  # a cut text does not show which words are values
            return REDACTED

    def _redact_content(self, content: Any, name: str) -> Any:
        """Return the content of JSON without secrets, by the `name` before it ('' at the top). All
        values below ``env`` are replaced, and each value behind a secret's name; in a table behind
        such a name its own names decide. `None` is kept; other texts are redacted like a script."""
        if isinstance(content, dict):
            return {
                key: self._redact_content(part, "env" if name == "env" else key)
                for key, part in content.items()
            }
        if isinstance(content, list):
            return [self._redact_content(part, key) for key, part in _with_names(content, name)]
        if content is not None and (name == "env" or _is_secret(name)):
            return REDACTED
        return self._redact_text(content, is_script=True) if isinstance(content, str) else content

    def _redact_text(self, text: str, is_script: bool) -> str:
        """Return a text without the known secrets, and without values behind the name of a secret
        or of the job's variables. In a script (`is_script`) a value may have line breaks."""
        for secret in self._values:
            text = text.replace(secret, REDACTED)
        for pattern in (*_SECRETS, self._in_script if is_script else self._in_log):
            text = pattern.sub(rf"\1{REDACTED}", text)
        return text


def _with_names(content: list[Any], name: str) -> list[tuple[str, Any]]:
    """Return (name, entry) for each entry of a list that stands behind `name`. The name is that of
    the list; for an entry behind an option ``--…``, as in arguments, it is the option."""
    entries_before = ["", *map(str, content[:-1])][: len(content)]  # [] for an empty list
    names = (word if word.startswith("--") else name for word in entries_before)
    return list(zip(names, content, strict=True))


def _secrets_in(content: Any, name: str) -> Iterator[str]:
    """Yield the secrets in the content of JSON: texts behind a secret's name (`name` is the one
    before the content, '' at the top; an option behind another option is no value), and the secrets
    within any text (`_SECRETS`)."""
    if isinstance(content, (dict, list)):
        parts = content.items() if isinstance(content, dict) else _with_names(content, name)
        for part_name, part in parts:
            yield from _secrets_in(part, part_name)
    elif isinstance(content, str):
        if _is_secret(name) and not content.startswith("--"):
            yield content
        for pattern in _SECRETS:
            # The match without group 1, and without quotes.
            yield from (m[0][len(m[1]) :].strip("\"'") for m in pattern.finditer(content))


def _is_secret(name: str) -> bool:
    """Return whether a name has a part like that of a secret."""
    return bool(re.search(SECRET_NAME, name, re.I))


def write_bundle(run: RunFolder, output: Path) -> tuple[list[str], list[str]]:
    """Write the archive of a run, `output`, for the user alone to read. Return the names of its
    entries, with a note behind each that was cut; and the omissions, sorted, with their reasons.

    Slurm is queried for its version and for the newest job; without an answer the job's record is
    an omission. After the first entry beyond `TOTAL_BYTES` none follows.

    Raises
    ------
    UsageError
        the archive exists already, or the run's job.json is broken
    OSError
        job.json or the journal can't be read, a file disappears meanwhile, or the archive can't be
        written; a part of it may lie in `output` then
    """
    top = RunFolder(run.whole)
    redaction = Redaction(JobSpec.from_json(read_text(top.job_json)), os.environ)
    names = {*JOB_FILES, *FOLDERS, *(folder.path.name for folder in top.tasks())}
    paths = (path for folder in _folders_of(run) for path in folder.path.iterdir())
    omissions = [
        f"{path.relative_to(top.path)} (by rule)" for path in paths if path.name not in names
    ]
    entries: list[str] = []
    size = 0
    with _create_archive(output) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text, note in _read_entries(run, omissions):
            content = redaction.redact_file(text, Path(name).suffix).encode(errors="replace")
            size += len(content)  # also of an entry that is left out: so none follows it
            if size > TOTAL_BYTES:
                omissions.append(f"{name} (beyond {TOTAL_BYTES >> 20} MiB in all)")
                continue
            entry = tarfile.TarInfo(f"hpc-ddp-{top.id}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
            entries.append(name + note)
    return entries, sorted(omissions)


def _create_archive(output: Path) -> IO[bytes]:
    """Create the file of the archive, with mode 0600, and return it open for writing. Raise
    UsageError where it exists, and OSError where it can't be made."""
    try:  # private: a secret without a telling name is not redacted
        return open(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError:
        raise UsageError(f"{output} exists; accepted: a new file", hint="-o OTHER.tar.gz") from None


def _read_entries(run: RunFolder, omissions: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, text and a note ('' for a complete file) of each entry, the most important first.

    Slurm is queried on the way. A file that is left out, or can't be read, is added to `omissions`,
    with the reason. Raise OSError where the run or its journal can't be read.
    """
    yield "versions.txt", _query_versions(RunFolder(run.whole)), ""
    for job in run.jobs(run.events())[-1:]:
        try:
            yield f"scontrol-{job.id}.txt", slurm.job_text(job), ""
        except HpcDdpError as error:
            omissions.append(f"scontrol show job {job.id} ({error})")
    for path in _list_files(run):
        name = str(path.relative_to(run.whole))
        limit = TOTAL_BYTES if path.suffix == ".jsonl" else LOG_BYTES
        try:
            if not stat.S_ISREG(path.lstat().st_mode) or LEFT_OUT.fullmatch(path.name):
                omissions.append(f"{name} (no text)")
                continue
            text, is_cut = _read_tail(path, limit)
        except OSError as error:
            omissions.append(f"{name} ({error.strerror})")
            continue
        yield name, text, f" (its last {limit >> 20} MiB)" if is_cut else ""


def _folders_of(run: RunFolder) -> list[RunFolder]:
    """Return the folders of a run: an array and its tasks, or a task's array and the task."""
    return [RunFolder(run.whole), *([run] if run.is_task else run.tasks())]


def _list_files(run: RunFolder) -> Iterator[Path]:
    """Yield the files of a run, in this order: job, journals, logs; of an array also those of its
    tasks, of a task also those of its array. Folders that are links, or may not be read, are left
    out."""
    folders = _folders_of(run)
    yield from (f.path / name for f in folders for name in JOB_FILES if (f.path / name).exists())
    for name in FOLDERS:
        tops = [f.path / name for f in folders if not (f.path / name).is_symlink()]
        yield from (p for top in tops for p in sorted(top.rglob("*")) if not p.is_dir())


def _read_tail(path: Path, limit_bytes: int) -> tuple[str, bool]:
    """Return the end of a file, at most `limit_bytes`, and whether its beginning is left out.

    The first line of such an end is left out, since it may lack the name that marks its value as a
    secret. So the text is '' where the end has no line break. Raise OSError where `open_data`
    refuses the file.
    """
    with open_data(path) as file:
        start = max(0, os.fstat(file.fileno()).st_size - limit_bytes)
        file.seek(start)
        text = file.read(limit_bytes).decode(errors="replace")
    return (text.partition("\n")[2] if start else text), bool(start)


def _query_versions(run: RunFolder) -> str:
    """Query Slurm, and return the versions of hpc-ddp, Slurm, Python and the system as lines of
    text. Without an answer of Slurm its line has the error. Raise OSError where the run's copy of
    hpc-ddp can't be read."""
    try:
        slurm_version = slurm.show_config().get("SLURM_VERSION", "unknown")
    except HpcDdpError as error:
        slurm_version = str(error)
    package = run.lib / "hpc_ddp" / "__init__.py"
    in_run = re.search(r'__version__ = "(.*)"', read_text(package) if package.is_file() else "")
    return (
        f"hpc-ddp here: {__version__}\nhpc-ddp in the run: {in_run[1] if in_run else 'unknown'}\n"
        f"Slurm: {slurm_version}\nPython here: {platform.python_version()}\n"
        f"system here: {platform.platform()}\n"
    )
