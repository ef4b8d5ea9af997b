"""The user of this process, and one without an entry in the user database."""

import os
import pwd

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.submission.settings.user import home_folder, user_name


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def fail(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", fail)


@pytest.mark.usefixtures("unknown_user")
def test_a_user_without_an_entry() -> None:
    assert user_name() == str(os.getuid())
    with pytest.raises(UsageError, match="no home folder: HOME is not set") as error:
        home_folder()
    assert str(error.value.hint).startswith("export HOME=")


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("HOME", "/home/ada")
    assert (user_name(), str(home_folder())) == ("ada", "/home/ada")
