"""Judges by owner and mode which files and runs of a shared disk may act for the user.

As git's ``safe.directory`` and sshd's ``StrictModes`` judge. An ACL's entries are not read: one of
POSIX shows in the group's bits, and those of NFSv4 and GPFS may not.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import ROOT, check_links
from hpc_ddp.core.run_folder import RunFolder


def file_fault(
    file: os.stat_result, folder: os.stat_result, uid: int, others_can_write: bool
) -> str:
    """Return why a settings file or template may not act for the user `uid`; '' if it may.

    `file` and `folder` are the status of the file and of its folder, `others_can_write` is what
    `is_writable_by_others` returns of the file. Files of root's are accepted. A folder that a group
    can write is accepted: a file that the group puts in place of this one would belong to another
    user, and be refused for that.
    """
    if not stat.S_ISREG(file.st_mode):
        return "it is no regular file"
    if file.st_uid not in (uid, ROOT):  # root can change what the user runs anyway
        return f"it belongs to {user_name(file.st_uid)}"
    if others_can_write:
        return f"other users can write it (mode {stat.S_IMODE(file.st_mode):04o})"
    # In /tmp a file of root's may be a hard link that another user has put there.
    is_kept = folder.st_mode & stat.S_ISVTX and file.st_uid == uid
    if folder.st_mode & stat.S_IWOTH and not is_kept:
        return "other users can replace it: all can write its folder"
    return ""


def is_writable_by_others(status: os.stat_result, file: int | Path) -> bool:
    """Return whether a user besides the owner can write a file or folder, by its `status`. `file`
    is its descriptor or its path; a link is followed.

    A group that holds only the owner counts as the owner, as Debian's sshd has it: with such groups
    comes the umask 002, by which all of a user's files can be written by the group. With an ACL the
    group's bits are those of its mask, and speak of other users and groups as well.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    by_group = bool(status.st_mode & stat.S_IWGRP)
    return by_group and not (_is_private(status.st_gid, status.st_uid) and not _has_acl(file))


def _has_acl(file: int | Path) -> bool:
    """Return whether a file or folder has a POSIX ACL besides its mode; False where the system or
    the file system knows none."""
    try:
        return "system.posix_acl_access" in os.listxattr(file)
    except (AttributeError, OSError):  # macOS has no listxattr
        return False


def _is_private(gid: int, uid: int) -> bool:
    """Return whether a group is the primary one of the user `uid`, has the user's name, and holds
    only this user; False for an unknown user or group."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    is_namesake = user.pw_gid == gid and user.pw_name == group.gr_name
    return is_namesake and not {*group.gr_mem} - {user.pw_name} and not _is_shared(gid, uid)


@functools.cache
def _is_shared(gid: int, uid: int) -> bool:
    """Return whether a group is the primary group of a user other than `uid`; the group's list of
    members lacks such users.

    All accounts have to be read. A directory such as LDAP may take seconds for that, so the answer
    is kept, and only a group with the user's name is asked for. Many directories show local
    accounts only, which is accepted: only root gives a user another one's group as the primary one.
    """
    return any(user.pw_gid == gid and user.pw_uid != uid for user in pwd.getpwall())


def user_name(uid: int) -> str:
    """Return the words for a user in a message: ``user NAME``, or ``uid N`` without an account."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"


def run_fault(path: Path, status: os.stat_result, uid: int, is_reachable: bool = True) -> str:
    """Return why the user `uid` may start nothing from a file or folder of a run; '' if the user
    may. `status` is that of the `path` by `lstat`.

    The owner always counts, since others may have reached the file earlier. The mode does not count
    for a link, nor where a folder above keeps others out (`is_reachable` is False). Unlike a
    settings file, a file of root's is refused, too: root writes settings for all users, but no user
    has to go on with a run of root's, in which they could not even save.
    """
    if status.st_uid != uid:
        return f"belongs to {user_name(status.st_uid)}"
    is_link = stat.S_ISLNK(status.st_mode)
    if is_reachable and not is_link and is_writable_by_others(status, path):
        return f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def check_folder(run: RunFolder) -> None:
    """Raise UsageError where a run is to be made, continued or deleted, and another user could put
    a folder in its place.

    The folder of all runs is checked, and the folder of the run's name in it. Where one of the two
    does not exist yet, the nearest folder above is checked, without its owner and mode. No folder
    above may be a link of another user. In a project's folder the group may rename what is above:
    so the batch script looks again at the owner of what it executes.

    Raises
    ------
    UsageError
        one of them belongs to another user (the folder of all runs may be root's), others can
        rename what is in it, it is no folder, it is a link of another user or to nowhere, or it
        can't be read
    """
    uid, folder_hint = os.geteuid(), "--runs-dir, or export HPC_DDP_RUNS=/a/folder/of/yours"
    for folder, owners in ((run.whole.parent, (uid,)), (run.root, (uid, ROOT))):
        refusal = f"runs are neither made nor deleted in {folder}:"
        part = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        try:
            check_links(part)
            status = part.stat()
        except FileNotFoundError:
            raise UsageError(f"{refusal} {part} is a link to nowhere", hint=folder_hint) from None
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise UsageError(f"{refusal} {reason}", hint=folder_hint) from None
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{refusal} {part} is no folder", hint=folder_hint)
        if part != folder:
            continue  # not made yet
        fault, hint = "", folder_hint
        if status.st_uid not in owners:
            fault = f"belongs to {user_name(status.st_uid)}"
        elif is_writable_by_others(status, part) and not status.st_mode & stat.S_ISVTX:
            fault = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
            hint = f"chmod +t {shlex.quote(str(folder))}, or chmod go-w; without effect? --runs-dir"
        if fault:
            raise UsageError(
                f"{refusal} it {fault}, so a run in it could be replaced; accepted: a folder of"
                " yours, in which others can rename nothing of yours",
                hint=hint,
            )


def check_kept_modes(run: RunFolder) -> None:
    """Raise UsageError for a run that other users can still write, right after this process has
    closed it to them. The batch script would start nothing of such a run, as on a file system that
    does not keep modes: a share of CIFS with ``dir_mode=0775``, or gcsfuse.

    The script's own check is ``_check_owner`` of the template. Owners are not checked here: the
    files are new, and so have the owner that the script compares with.

    Raises
    ------
    UsageError
        others can still enter the run, and write in it what is executed
    OSError
        a part of it can't be looked at
    """
    if not stat.S_IMODE(run.path.stat().st_mode) & 0o077:
        return
    for path in _paths_with_modes(run):
        mode = path.lstat().st_mode
        if mode & 0o022 and not stat.S_ISLNK(mode):
            raise UsageError(
                f"the file system of {run.root} does not keep permissions: {path} has mode"
                f" {stat.S_IMODE(mode):04o} whatever chmod has set, and a job starts nothing that"
                " other users can write",
                hint="--runs-dir, or export HPC_DDP_RUNS=/path/on/scratch",
            )


def _paths_with_modes(run: RunFolder) -> Iterator[Path]:
    """Yield the files and folders of a run whose modes the batch script checks."""
    yield from (run.path, *run.path.glob("job.*"))
    for tree in (run.lib, run.code, run.submitit):
        if tree.is_symlink():  # of a task, to the array's
            continue
        for path in (tree, *tree.rglob("*")):
            # As the template's `_check_owner` names them; .pyc is among ".py".
            is_named = path.name in ("lib", "stage.sh", "supervisor.pkl") or ".py" in path.name
            if is_named and os.path.lexists(path):
                yield path


def check_executable(run: RunFolder) -> None:
    """Raise UsageError for a run that the user may only read: nothing in it is to be started, and
    the processes and jobs that its files name are not to be signalled.

    A file at fault in a ``__pycache__`` of the user's, which Python or a container's root has
    compiled, is deleted, and is no error: Python compiles anew.

    Raises
    ------
    UsageError
        the run, or a file in it that would be executed or names jobs, belongs to another user, or
        can be written by one
    OSError
        the run, or a file in it, is gone or can't be read
    """
    uid = os.geteuid()
    is_reachable = bool(stat.S_IMODE(run.whole.stat().st_mode) & 0o077)
    for path in _paths_to_own(run):
        fault = run_fault(path, path.lstat(), uid, is_reachable)
        if fault and not _remove_compiled(path, uid):
            raise UsageError(
                f"run {run.path} can only be read: {path} {fault}; accepted: a run that is yours,"
                " and that no other user can write",
                hint=_hint_for_fault(run, path, uid),
            )


def _remove_compiled(path: Path, uid: int) -> bool:
    """Remove a file in a ``__pycache__`` of the user's, where Python, or a container's root, keeps
    what it has compiled; return True if `path` was such a file, and is gone. Return False, and
    remove nothing, for any other path. Raise OSError where the folder can't be looked at."""
    if path.parent.name != "__pycache__" or path.parent.lstat().st_uid != uid:
        return False
    with suppress(OSError):
        path.unlink()
        return True
    return False


def is_executable(run: RunFolder) -> bool:
    """Return whether `check_executable` lets the user start from a run, which deletes compiled
    files that are at fault. Raise OSError where the run, or a file in it, is gone or can't be
    read."""
    try:
        check_executable(run)
    except UsageError:
        return False
    return True


def _hint_for_fault(run: RunFolder, path: Path, uid: int) -> str:
    """Return the hint for a run whose file or folder `path` is at fault for the user `uid`. Raise
    OSError where `path` is gone."""
    if path.lstat().st_uid == uid:  # one part that others can write is seldom the only one
        return f"chmod -R go-w {shlex.quote(str(run.whole))}, if its content is still yours"
    return "submit the script yourself, as a run of your own: hpc-ddp submit SCRIPT"


def _paths_to_own(run: RunFolder) -> Iterator[Path]:
    """Yield the paths that have to be the user's own: the folders of the run, its array and its
    tasks, and all in them that is executed, or names jobs and processes to signal. Checkpoints are
    data: only their folder counts. Raise OSError where a folder can't be listed."""
    for folder in dict.fromkeys((run.whole, run.path, *(task.path for task in run.tasks()))):
        part = RunFolder(folder)
        tops = [part.job_json, part.script, part.journal_folder, part.logs, part.checkpoints]
        tops += [part.start_note, part.limits_json]
        # A task of submitit loads these pickles.
        tops += [
            part.submitit,
            *part.submitit.glob("su*.pkl"),
            *part.submitit.glob("*_submitted.pkl"),
        ]
        # The run's folder also where it is gone: the caller's look at it then raises.
        yield from (path for path in (folder, *tops) if path == run.whole or os.path.lexists(path))
        for tree in (part.lib, part.code):
            if os.path.lexists(tree):
                yield tree
            if tree.is_symlink():  # a task's, to the array's
                continue
            for parent, folders, files in os.walk(tree):
                yield from (Path(parent, name) for name in (*folders, *files))
        yield from part.journal_folder.glob("*.jsonl")
        for attempt in part.attempts():
            yield attempt.path
            yield from attempt.path.glob("*.json")


def checkpoint_fault(run: RunFolder, folder: Path) -> str:
    """Return, in words, the first part of a library's checkpoint, `folder`, that belongs to another
    user, who could run code by its pickles; '' where none does. Parts of root's are accepted. To
    learn which owner new files have, a file is made in the folder of the run's checkpoints for a
    moment.

    Modes count even where others can't enter the run now: a start closes a run that was open, and
    they may have written before.

    Raises
    ------
    HpcDdpError
        other users can write a part of the checkpoint; or they own, or can write, the folder of the
        run's checkpoints
    OSError
        a part of it can't be looked at
    """
    owners = (_owner_of_new_files(run.checkpoints), ROOT)
    parts = {path: _statuses(path) for path in (folder, *folder.rglob("*"))}
    for path, statuses in parts.items():
        for uid in {status.st_uid for status in statuses} - {*owners}:
            return f"{path.relative_to(run.checkpoints)} belongs to {user_name(uid)}"
    for path, statuses in {run.checkpoints: _statuses(run.checkpoints), **parts}.items():
        for status in statuses:
            is_open = not stat.S_ISLNK(status.st_mode) and is_writable_by_others(status, path)
            if status.st_uid not in owners or is_open:
                _refuse_checkpoint(run, folder, path, status.st_uid not in owners)
    return ""


def _refuse_checkpoint(run: RunFolder, folder: Path, path: Path, is_of_another: bool) -> NoReturn:
    """Raise HpcDdpError for the checkpoint `folder`, which others may have changed: another user
    owns `path` (`is_of_another`), or other users can write it."""
    checkpoints = shlex.quote(str(run.checkpoints))
    fault = "another user owns" if is_of_another else "other users can write"
    raise HpcDdpError(
        f"{folder} is not loaded: {fault} {path}, and a library's checkpoint can"
        " run code; accepted: what only you can write",
        hint=f"cp -r {run.quoted} into a folder of yours, if you trust it, and --run that"
        if is_of_another
        else f"chmod -R go-w {checkpoints}, if its content is still yours: ls -lR {checkpoints}",
    )


def _owner_of_new_files(folder: Path) -> int:
    """Return the user id that a new file in a folder belongs to, by making one for a moment: some
    file systems give all files to one user. Return this user's where no file can be made, as on a
    full disk."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()


def _statuses(path: Path) -> list[os.stat_result]:
    """Return the status of a file or folder, and for a link also the status of what it leads to, if
    that exists. Raise OSError where `path` does not exist."""
    statuses = [path.lstat()]
    if stat.S_ISLNK(statuses[0].st_mode):
        with suppress(FileNotFoundError):
            statuses.append(path.stat())
    return statuses


def other_owner(path: Path) -> str:
    """Return the words for the user that a run's folder belongs to; '' where that is this user, or
    where the folder can't be looked at."""
    try:
        uid = path.lstat().st_uid
    except OSError:
        return ""
    return "" if uid == os.geteuid() else user_name(uid)
