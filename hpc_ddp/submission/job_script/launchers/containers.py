"""The tools of containers, each of which starts a launcher or the program in an image.

How the functions are called, `torchrun.py` says.
"""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Word, join_words, literal
from hpc_ddp.submission.job_script.conversion import LOST
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import Options, is_launcher
from hpc_ddp.submission.job_script.launchers.unknown_words import (
    Kind,
    kind_before_command,
    kind_before_image,
    take_all_options,
)

# Apptainer's options without a value; all others have one.
_IMAGE_FLAGS = re.compile(
    r"nv|nvccli|rocm|intel-hpu|cleanenv|compat|contain|containall|writable(-tmpfs)?|fakeroot|userns"
    r"|ipc|pid|uts|net|oci|rm|allow-setuid|disable-cache|docker-login|keep-privs|oom-kill-disable"
    r"|(no-)?tmp-sandbox|underlay|unsquash|sharens|no-(eval|home|https|init|pid|privs|umask|nv|rocm)"
)

_IMAGE_LETTERS = {"c": "contain", "C": "containall", "e": "cleanenv", "f": "fakeroot", "i": "ipc",
                  "p": "pid", "u": "userns", "w": "writable"}  # fmt: skip

# Workers have what they need, as the rank, in variables of the job.
_IMAGE_USES = {"env": "env", "cleanenv|containall|compat": "lost", ".*": "&container-options"}

_IMAGE = Options(_IMAGE_USES, _IMAGE_FLAGS, _IMAGE_LETTERS)

_SHIFTER_LETTERS = {"i": "image", "V": "volume", "e": "env", "E": "clearenv", "w": "workdir",
                    "m": "module", "v": "verbose"}  # fmt: skip

_SHIFTER_USES = {"image": "=image", "clearenv": "lost", ".*": "+container-options"}

_SHIFTER = Options(_SHIFTER_USES, re.compile("gpu|clearenv|verbose|entrypoint"), _SHIFTER_LETTERS)


def read_container(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read options and image of Shifter, Singularity or Apptainer into the settings ``image``,
    ``container-options`` and ``container-tool`` of `launch`. Return the words behind the image, []
    where the tool starts no program (``shell``, ``pull``)."""
    tool = words[0].text.rsplit("/", 1)[-1]
    if tool != "shifter":
        return _read_singularity(tool, words, launch, scope)
    key = "container-options = […]"
    remaining, _ = take_all_options(
        words, _SHIFTER, launch, scope, kind_before_command, "shifter", key
    )
    launch.settings["container-tool"] = [literal(tool, words[0].line)]
    return remaining


def _read_singularity(tool: str, words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read Singularity or Apptainer, the `tool`, as `read_container` does.

    ``run`` in front of a launcher keeps the image's runscript (container-tool ``TOOL-run``); in
    front of another program it is read as ``exec``, and the line is lost. Options before the verb
    are left out with a note.
    """
    verbs = ("exec", "run", "shell")
    at = next((i for i, word in enumerate(words) if i and word.text in verbs), 0)
    if not at or words[at].text == "shell":  # 0: no such verb
        return []
    for word in words[1:at]:
        launch.mark(word.line, "", f"{tool} {word.text} is left out: container = …")
    name, key = f"{tool} {words[at].text}", "container-options = […]"
    remaining, kind = take_all_options(
        words[at:], _IMAGE, launch, scope, kind_before_image, name, key
    )
    remaining = _take_image(remaining, kind, launch)
    if words[at].text == "run" and remaining and is_launcher(remaining[0].text):
        tool = f"{tool}-run"
    elif words[at].text == "run":
        text = f"{tool} run: what the image's runscript does is left out: it is exec here"
        launch.mark(words[0].line, LOST, text)
    launch.settings["container-tool"] = [literal(tool, words[0].line)]
    return remaining


def _take_image(words: list[Word], kind: Kind, launch: Launch) -> list[Word]:
    """Set the image of `launch` to the first of `words`, and return the others. Where only the job
    knows what that word is, by its `kind`, the words before the next launcher are lost, and there
    is no image; nor is there one where Python or a launcher comes first."""
    if kind == Kind.UNKNOWN:
        at = next((i for i, word in enumerate(words) if is_launcher(word.text)), len(words))
        for word in words[:at]:
            text = f"{word.text}: only the job knows whether it is the image: image = …"
            launch.mark(word.line, LOST, text)
        return words[at:]
    if words and re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed|bash", words[0].text):
        launch.mark(words[0].line, LOST, f"no image before {words[0].text}: image = …")
        return words
    launch.settings |= {"image": words[:1]} if words else {}
    return words[1:]


def read_wrapper(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read a site's command that enters a container, as CSC's ``singularity_wrapper exec``: its
    words up to ``exec``, or all without one, become the setting ``container`` of `launch`. Return
    the words behind ``exec``."""
    at = next((i for i, word in enumerate(words) if word.text == "exec"), len(words))
    pieces = [piece for word in words[: at + 1] for piece in (" ", word)]
    launch.settings["container"] = [join_words(*pieces[1:])]
    return words[at + 1 :]
