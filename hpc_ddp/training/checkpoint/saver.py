"""Saving and restoring a run together: every rank calls these, rank 0 decides for all.

A save has two halves. The training's thread copies what is to be saved (`Content`); a thread of
its own writes it, agrees with its peers over a process group of its own, and publishes. One save
is under way at a time: the next waits for it.
"""

from __future__ import annotations

import errno
import io
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from hpc_ddp.run import checkpoints
from hpc_ddp.run.checkpoints import FileFacts
from hpc_ddp.run.errors import DiskError, HpcDdpError
from hpc_ddp.run.events import CheckpointRestored, CheckpointSaved, SaveFailed
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Journal
from hpc_ddp.run.patience import patiently
from hpc_ddp.training.checkpoint import files as disk
from hpc_ddp.training.checkpoint.files import Retention
from hpc_ddp.training.checkpoint.inventory import Digest, Inventory, find_fault, fit_together
from hpc_ddp.training.checkpoint.shards import Reader
from hpc_ddp.training.checkpoint.state import joined
from hpc_ddp.training.process.process_group import Control

T = TypeVar("T")

STATE = "state.pt"
TRIES = 3  # failed saves in a row that end the run, if they are spread over as many seconds:
PATIENCE_S = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_SAVED, _SUPERSEDED, _NON_FINITE = "saved", "superseded", "non-finite"
_UNFIT = "unfit"  # what the ranks have does not fit together
_FAILED, _FAILING = "failed", "failing"  # the latter for `PATIENCE_S` already


class SupersededError(HpcDdpError):
    """A later attempt of this run has started: this one must not touch the run any more."""


@dataclass(frozen=True)
class Content:
    """Everything that one rank has to save: nothing in it changes until it is saved.

    Attributes
    ----------
    step
        of the run
    facts
        for the manifest, in plain values; ``best`` (a dict with ``step``, or None) among them
    shared
        what is the same on all ranks, in plain values; rank 0's is written
    rank_values
        this rank's own plain values, ``pieces`` of its data file among them
    data
        returns the bytes of the data file, in order, and for how many seconds a device was busy
        to copy them; waits for them, behind the training
    inventory
        returns the names, shapes and parts of all tensors, for the ranks to compare; called behind
        the training
    is_finite
        tells whether it is fit to go on from; asked behind the training
    stall_s
        for how long the host has been held up so far, in seconds
    """

    step: int
    facts: dict[str, Any]
    shared: dict[str, Any]
    rank_values: dict[str, Any]
    data: Callable[[], tuple[Sequence[memoryview], float]]
    inventory: Callable[[], Inventory]
    is_finite: Callable[[], bool]
    stall_s: float


class Failure(NamedTuple):
    """An error as a rank sends it to rank 0: its code, if it was the system's, and its text."""

    code: int | None
    text: str


class Claim(NamedTuple):
    """The amount that a rank is to write, sent to rank 0: bytes, files, a digest of its tensors."""

    size: int
    files: int
    digest: Digest


Files = dict[str, Sequence[bytes | memoryview]]
Outcome = tuple[str, str]  # of a save: its kind, and why or how many bytes


@dataclass(frozen=True)
class Restored:
    """A checkpoint that verified. `owns` has what each of its ranks had of its own, by rank."""

    step: int
    shared: dict[str, Any]
    owns: list[dict[str, Any]]
    reader: Reader


class Checkpoints:
    """The checkpoints of a run, as this attempt sees them.

    `control` is for the training's thread, `background` for the one that saves.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        control: Control,
        background: Control,
        journal: Journal,
        keep: Retention,
        before_publishing: Callable[[int], None] = lambda step: None,  # on rank 0
    ) -> None:
        self._run, self._attempt, self._keep = run, attempt, keep
        self._control, self._background, self._journal = control, background, journal
        self._thread: threading.Thread | None = None
        self._known = threading.Event()  # what has become of the save is
        self._known.set()
        self._outcome: Outcome = (_SAVED, "")
        self._refusal: HpcDdpError | None = None  # no other try would end otherwise
        self._failures = 0
        self._failing_since: float | None = None  # on rank 0, whose clock counts
        self._begun = False
        self._awaited_since: float | None = None
        self.stall_s = 0.0  # for how long the last save held the training up, in seconds
        self.slowest_save_s = 0.0  # the longest time until one was durable, in seconds
        self._before_publishing = before_publishing

    # -- saving ----------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return not self._known.is_set()

    @property
    def failed(self) -> bool:
        """The last save has failed, or found the run taken over; `settle` says so to all ranks."""
        return not self.in_flight and self._outcome[0] != _SAVED

    def begin(self, content: Content) -> None:
        """Start to write; the one before has been settled."""
        self.tidy()
        self._known.clear()
        self._begun = True
        self.stall_s = content.stall_s
        self._thread = threading.Thread(target=self._save, args=(content,), daemon=True)
        self._thread.start()

    def tidy(self) -> None:
        """Wait until old checkpoints are removed, too."""
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> bool:
        """Wait until what was begun is durable; False when it failed and is worth another try.

        All ranks call it at the same step, and get the same answer.

        Raises
        ------
        HpcDdpError
            it failed for the third time in a row, and has done so for half a minute
        SupersededError
            a later attempt has started; nothing was published
        HpcDdpError
            not all of the weights were finite, or what the ranks have does not make a whole;
            nothing was published
        """
        if not self._begun:
            return True
        self._awaited_since = time.monotonic()
        self._known.wait()
        self._awaited_since, self._begun = None, False
        kind, why = self._outcome
        if kind == _SUPERSEDED:
            raise SupersededError(
                f"attempt {self._attempt} of {self._run.path} has been superseded by a later one"
                " and leaves the run alone"
            )
        if kind == _NON_FINITE:
            raise self.non_finite_error(why)
        if self._refusal is not None:
            raise self._refusal
        self._failures = self._failures + 1 if kind in (_FAILED, _FAILING) else 0
        if kind == _FAILING and self._failures >= TRIES:
            raise HpcDdpError(
                f"{self._failures} saves in a row failed in {self._run.checkpoints}: {why}",
                hint=f"look at the folder, and for free space and quota: df -h {self._run.path}",
            )
        return kind == _SAVED

    def _save(self, content: Content) -> None:
        """In the thread: take part in a save, and report it."""
        began = time.monotonic()
        first = self._background.rank == 0
        draft = disk.draft(self._run.checkpoints, content.step, self._attempt)
        try:
            self._outcome = self._write_together(draft, content)
        except Exception as error:  # a peer is gone: the training will find that out, too
            self._outcome = _FAILING, f"the ranks could not agree: {error}"
        took = time.monotonic() - began
        self.slowest_save_s = max(self.slowest_save_s, content.stall_s + took)
        if first:
            self._report(content, took)
        self._known.set()
        # Only now, with the new one durable; nobody waits for it, and a kill in between is mended
        # by the next start.
        if first and self._outcome[0] == _SAVED:
            self._prune(content, self._keep)

    def _prune(self, content: Content, keep: Retention) -> None:
        """On rank 0: remove old checkpoints, but for the best and what `keep` names."""
        best = content.facts.get("best") or {"step": content.step}
        with suppress(OSError):  # a folder that is not to be had now; the next save tries again
            disk.prune(self._run.checkpoints, keep, [content.step, best["step"]])

    def _write_together(self, draft: Path, content: Content) -> Outcome:
        """Write, where all ranks have what belongs together and there is room for all of it.

        Every rank answers each time, be it by a `Failure`, since its peers wait for it.
        """
        background, is_first = self._background, self._background.rank == 0
        files, claim = self._prepare(content)
        claims = background.to_first(claim)
        outcome = background.from_first(
            self._refuse_early(draft, content, claims) if is_first else None
        )
        if outcome is None:
            answers = background.to_first(self._write(draft, files, content))
            outcome = background.from_first(
                self._be_patient(self._judge(draft, content, answers)) if is_first else None
            )
        elif outcome[0] == _UNFIT:
            self._refusal = _fault(background, content.inventory())
            outcome = _UNFIT, self._refusal.message
        result: Outcome = outcome
        return result

    def _prepare(self, content: Content) -> tuple[Files, Claim | Failure]:
        """Return what this rank's files are to hold, by name, and how much that is."""
        rank = self._background.rank
        try:
            files: Files = {f"rank-{rank}.pt": [_dump(content.rank_values)]}
            data, copy_s = content.data()
            self.stall_s = content.stall_s + copy_s
            if content.rank_values["pieces"]:  # of tensors without numbers it is empty
                files[f"tensors-{rank}.bin"] = data
            if rank == 0:
                files[STATE] = [_dump(content.shared)]
            size = sum(len(part) for parts in files.values() for part in parts)
            return files, Claim(size, len(files), content.inventory().digest)
        except Exception as error:  # whatever it is, the peers wait for an answer
            return {}, _failure(error)

    def _refuse_early(
        self, draft: Path, content: Content, claims: list[Claim | Failure]
    ) -> Outcome | None:
        """On rank 0, before anything is written: return why nothing is to be, None to go on."""
        sound = [claim for claim in claims if isinstance(claim, Claim)]
        if len(sound) < len(claims):
            return self._be_patient(self._drop(draft, content, claims))
        if not fit_together([claim.digest for claim in sound]):
            return _UNFIT, ""
        size, files = sum(claim.size for claim in sound), sum(claim.files for claim in sound)
        try:
            draft.mkdir(parents=True, exist_ok=True)
            try:
                disk.check_space(draft, size, files + 1)
            except OSError:
                self._make_room(content)
                disk.check_space(draft, size, files + 1)
        except OSError as error:
            return self._be_patient(self._drop(draft, content, [_failure(error)]))
        return None

    def _write(
        self, draft: Path, files: Files, content: Content
    ) -> dict[str, FileFacts] | str | Failure:
        """Write this rank's files of a draft; return what goes into the manifest."""
        try:
            with ThreadPoolExecutor(1) as pool:  # while the disk is busy
                sound = pool.submit(content.is_finite)
                facts = {n: disk.write_file(draft / n, *parts) for n, parts in files.items()}
            return facts if sound.result() else _NON_FINITE
        except Exception as error:  # as above
            return _failure(error)

    def _drop(self, draft: Path, content: Content, answers: Sequence[object]) -> Outcome:
        """On rank 0: remove a draft of which a rank has failed; see to room if that was why."""
        disk.remove(draft)
        rank, failure = next((r, a) for r, a in enumerate(answers) if isinstance(a, Failure))
        if failure.code in NO_ROOM:
            self._make_room(content)
        return _FAILED, f"rank {rank}: {failure.text}"

    def _make_room(self, content: Content) -> None:
        """On rank 0: let all but the newest checkpoints, the best and the milestones give way."""
        if self._run.is_newest(self._attempt):
            self._prune(content, Retention(disk.LEAST, self._keep.every))

    def _judge(self, draft: Path, content: Content, answers: list[Any]) -> Outcome:
        """On rank 0: complete and publish a draft, or remove it."""
        if _NON_FINITE in answers:
            disk.remove(draft)
            return _NON_FINITE, str(content.step)
        if any(isinstance(answer, Failure) for answer in answers):
            return self._drop(draft, content, answers)
        files: dict[str, FileFacts] = {
            n: facts for answer in answers for n, facts in answer.items()
        }
        facts = {
            "format": checkpoints.FORMAT,
            "step": content.step,
            "world_size": self._background.world_size,
            **content.facts,
        }
        try:
            self._before_publishing(content.step)
            disk.write_manifest(draft, facts, files)
            # Looked at as late as can be: from the rename on, a successor would see it.
            if not self._run.is_newest(self._attempt):
                disk.remove(draft)
                return _SUPERSEDED, ""
            disk.publish(draft, self._attempt)
        except Exception as error:  # as above
            return self._drop(draft, content, [_failure(error)])
        return _SAVED, str(sum(file_facts.size for file_facts in files.values()))

    def _be_patient(self, outcome: Outcome) -> Outcome:
        """On rank 0: tell failures that have lasted from those that may pass."""
        kind, why = outcome
        if kind != _FAILED:
            self._failing_since = None
            return outcome
        self._failing_since = self._failing_since or time.monotonic()
        lasted = time.monotonic() - self._failing_since >= PATIENCE_S
        return (_FAILING if lasted else _FAILED), why

    def _report(self, content: Content, took: float) -> None:
        kind, detail = self._outcome
        if kind in (_FAILED, _FAILING, _UNFIT):
            self._journal.write(SaveFailed(content.step, detail))
            _say(f"the checkpoint of step {content.step} could not be saved ({detail})")
        elif kind == _SAVED:
            since = self._awaited_since  # the training waits for it: that is a stall, too
            waited = 0.0 if since is None else time.monotonic() - since
            stall = self.stall_s + waited
            self._journal.write(
                CheckpointSaved(content.step, round(stall, 4), round(took, 4), int(detail))
            )

    def non_finite_error(self, step: int | str) -> HpcDdpError:
        """Return the error that ends a run whose weights can't be gone on from."""
        newest_first = checkpoints.candidates(self._run.checkpoints)
        last = newest_first[0].name if newest_first else "none"
        return HpcDdpError(
            "the weights have NaN or infinity in them; it came at or before step"
            f" {step}; last checkpoint: {last}",
            hint="lower the learning rate, or clip: run.update(optimizer, clip_norm=1.0)",
        )

    def warn(self, text: str) -> None:
        """Print a warning, on rank 0."""
        if self._control.rank == 0:
            _say(text)

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        agreed: float = self._control.from_first(value)
        return agreed

    def check(self, inventory: Inventory) -> None:
        """Refuse, on all ranks, tensors that would not make a whole; called before the training.

        Raises
        ------
        HpcDdpError
            names a tensor that is sharded otherwise on some rank, or that a rank lacks
        """
        digests = self._control.to_first(inventory.digest)
        if not self._control.from_first(self._control.rank != 0 or fit_together(digests)):
            raise _fault(self._control, inventory)

    # -- restoring -------------------------------------------------------------------------

    def restore(self) -> Restored | None:
        """Open the newest checkpoint that verifies; None for a run that has never had one.

        The ranks share the reading. A damaged one is named on stderr and in the journal, and set
        aside as `.bad-`.

        Raises
        ------
        HpcDdpError
            a disk does not answer for a minute; or the run has had checkpoints, and none is good
        """
        began = time.monotonic()
        names = self._from_first(self._find_names)
        if self._control.rank == 0:
            disk.clear_drafts(self._run.checkpoints)
        passed_over: list[str] = []
        chosen = None
        for folder in map(self._run.checkpoints.joinpath, names):
            damage = self._damage_of(folder)
            if damage is None:
                chosen = folder
                break
            passed_over.append(f"{folder.name}: {damage}")
            if self._control.rank == 0:
                self._set_aside(folder, damage)
        if self._control.rank == 0:
            self._report_restore(chosen, passed_over, time.monotonic() - began)
        if chosen is None:
            self._from_first(partial(self._refuse_step_0, passed_over))
            return None
        return self._open(chosen)

    def load(self, step: int) -> Restored:
        """Verify the checkpoint of a step and open it on the CPU.

        Raises
        ------
        HpcDdpError
            it is not there, or damaged, or can't be read
        """
        folder = self._run.checkpoints / f"step-{step}"
        names = self._from_first(self._find_names)
        damage = self._damage_of(folder) if folder.name in names else "it is not there"
        if damage:
            raise HpcDdpError(f"{folder}: {damage}", hint=f"hpc-ddp verify {self._run.path}")
        return self._open(folder)

    def _find_names(self) -> list[str]:
        """Return the names of what may be a checkpoint, newest first; on rank 0."""
        # A disk that is gone for a moment must not look like a run without checkpoints.
        folder = self._run.checkpoints
        patiently(folder.stat)
        return [path.name for path in patiently(partial(checkpoints.candidates, folder))]

    def _refuse_step_0(self, damaged: list[str]) -> None:
        """Raise an error on a run that has had checkpoints; on rank 0, which has no good one."""
        if lost := damaged or checkpoints.lost(self._run):
            raise HpcDdpError(
                f"{self._run.path} has no good checkpoint any more, and does not begin at step 0"
                f" by itself: {'; '.join(lost)}",
                hint="to begin at step 0, and keep what there is:"
                f" {checkpoints.fresh_command(self._run)}",
            )

    def _from_first(self, act: Callable[[], T]) -> T:
        """Return on all ranks what `act` returns on rank 0; its errors are raised on all."""
        answer: Any = None
        if self._control.rank == 0:
            try:
                answer = act()
            except HpcDdpError as error:
                answer = error
            except OSError as error:
                answer = _unreadable(self._run.checkpoints, error)
        answer = self._control.from_first(answer)
        if isinstance(answer, HpcDdpError):
            raise answer
        result: T = answer
        return result

    def _open(self, folder: Path) -> Restored:
        rank, world_size = self._control.rank, self._control.world_size
        try:
            shared, owns, reader = open_checkpoint(folder, rank, world_size)
        except OSError as error:
            raise _unreadable(folder, error, rank) from error
        every = [owns[number] for number in sorted(owns)]
        return Restored(checkpoints.step_of(folder), shared, every, reader)

    def _damage_of(self, folder: Path) -> str | None:
        """Return what is damaged in a checkpoint, None where nothing is; the same on all ranks."""
        # Asked again after damage, since it may have been the disk's and not the file's.
        return self._find_damage(folder) and self._find_damage(folder)

    def _find_damage(self, folder: Path) -> str | None:
        """Let the ranks verify a checkpoint together; all get the same answer, or error."""
        rank, world_size = self._control.rank, self._control.world_size
        answer: str | HpcDdpError | None
        try:
            answer = patiently(partial(checkpoints.find_damage, folder, rank, world_size))
        except OSError as error:
            answer = _unreadable(folder, error, rank)
        answers = self._control.to_first(answer)
        return self._from_first(partial(_damage_in, answers))

    def _set_aside(self, folder: Path, why: str) -> None:
        try:
            target = disk.set_aside(folder, "bad", self._attempt).name
        except OSError as error:  # a folder that can be read only: the next start passes it over
            target = f"{folder.name}: {error}"
        _say(f"PASSED OVER the checkpoint {folder.name}: {why}; kept as {target}")

    def _report_restore(self, chosen: Path | None, passed_over: list[str], took: float) -> None:
        step = checkpoints.step_of(chosen) if chosen else 0
        if chosen or passed_over:
            self._journal.write(CheckpointRestored(step, passed_over, round(took, 3)))
        if chosen:
            _say(f"going on from step {step} of {self._run.path}")


def _damage_in(answers: list[str | HpcDdpError | None]) -> str | None:
    """Return the first damage that a rank reports; an error comes first, and is raised."""
    for answer in answers:
        if isinstance(answer, HpcDdpError):
            raise answer
    return next((answer for answer in answers if isinstance(answer, str)), None)


def _unreadable(folder: Path, error: OSError, rank: int = 0) -> DiskError:
    cure = "when the disk answers"
    if error.errno in (errno.EACCES, errno.EPERM):
        cure = f"with permission to read all of it: ls -l {folder}"
    return DiskError(
        f"{folder} can't be read on rank {rank}, and was waited for: {error.strerror or error}",
        hint=f"the checkpoint stays as it is: start the run again {cure}",
    )


def _fault(control: Control, inventory: Inventory) -> HpcDdpError:
    """Return on all ranks what keeps their tensors from fitting together."""
    inventories = control.to_first(inventory)
    fault: HpcDdpError = control.from_first(find_fault(inventories) if inventories else None)
    return fault


def _failure(error: Exception) -> Failure:
    return Failure(getattr(error, "errno", None), str(error) or repr(error))


def open_checkpoint(
    folder: Path, rank: int = 0, world_size: int = 0
) -> tuple[dict[str, Any], dict[int, dict[str, Any]], Reader]:
    """Return what all ranks shared, what each had of its own, and the tensors; verify it first.

    Where ranks had tensors of their own (see `state.my_parts`), they are this rank's if as many
    ranks wrote it as there are now, and else rank 0's.

    Raises
    ------
    HpcDdpError
        another version of hpc-ddp has written it
    """
    manifest = checkpoints.read_manifest(folder)
    if (version := manifest.get("format")) != checkpoints.FORMAT:
        raise HpcDdpError(
            f"{folder} has format {version}; this hpc-ddp reads format {checkpoints.FORMAT}",
            hint="go on with the hpc-ddp that wrote it: <run>/lib has it",
        )
    names = [name for name in manifest["files"] if name.startswith("rank-")]
    owns = {record["rank"]: record for record in (_load(folder / name) for name in names)}
    data = [(folder / f"tensors-{rank}.bin", record["pieces"]) for rank, record in owns.items()]
    shared = _load(folder / STATE)
    for rank_of_stage in sorted(owns):
        if "tree" in owns[rank_of_stage]:
            shared["tree"] = joined(shared["tree"], owns[rank_of_stage].pop("tree"))
    return shared, owns, Reader(data, rank if len(owns) == world_size else None)


def _dump(value: Mapping[str, Any]) -> bytes:
    """Return plain values and small tensors as the bytes of a file for ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _load(path: Path) -> dict[str, Any]:
    # On the CPU, and never pickled code.
    content = io.BytesIO(patiently(path.read_bytes))
    value: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    return value


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads stderr any more: no reason to fail
        print(f"hpc-ddp: {text}", file=sys.stderr, flush=True)
