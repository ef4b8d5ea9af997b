"""The page of all settings and commands follows their declarations."""

from __future__ import annotations

from dataclasses import fields

from hpc_ddp.core.job.option_declaration import GROUPS, key_of
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission.settings.config import OPTIONS, Placement
from tools import reference


def test_the_page_is_up_to_date() -> None:
    assert reference.PAGE.read_text() == reference.page(), "python -m tools.reference"


def test_each_setting_is_declared_in_a_group() -> None:
    names = {
        key_of(declared_field)
        for settings in (JobSpec, Placement)
        for declared_field in fields(settings)
    }
    assert names - OPTIONS.keys() == {"script", "args", "sweep", "submit-dir"}
    assert {declared.group for declared in OPTIONS.values()} == {*GROUPS}
