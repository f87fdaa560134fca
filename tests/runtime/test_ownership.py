import grp
import os
import pwd

import pytest

from neuron_streams._runtime.ownership import why_not_ours
from tests.runtime.other_users import ALICE, BOB, as_user, needs_root, open_folder


@pytest.fixture
def folder():
    with open_folder() as made:
        yield made


def test_what_this_user_made_is_theirs(tmp_path):
    assert why_not_ours(tmp_path) is None


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777])
def test_what_every_user_may_write_is_not(tmp_path, mode):
    tmp_path.chmod(mode)
    assert why_not_ours(tmp_path) == "may be written by every user"


@needs_root
def test_what_a_group_may_write_is_not(folder):
    folder.chmod(0o775)
    os.chown(folder, 0, ALICE)
    assert why_not_ours(folder) == f"may be written by other users (group {ALICE})"
    folder.chmod(0o755)
    assert why_not_ours(folder) is None


@needs_root
def test_the_group_of_root_and_the_own_group_may_write(folder, monkeypatch):
    folder.chmod(0o775)
    assert why_not_ours(folder) is None
    os.chown(folder, 0, ALICE)
    user = pwd.struct_passwd(("alice", "x", 0, ALICE, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    for name, members, alone in (
        ("alice", [], True),
        ("alice", ["alice"], True),
        ("alice", ["bob"], False),
        ("users", [], False),
    ):
        group = grp.struct_group((name, "x", ALICE, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, group=group: group)
        assert (why_not_ours(folder) is None) == alone


@needs_root
def test_what_another_user_owns_is_not(folder):
    os.chown(folder, ALICE, ALICE)
    reason = f"belongs to another user (uid {ALICE})"
    assert why_not_ours(folder) == reason
    assert as_user(BOB, why_not_ours, folder) == reason
    assert as_user(ALICE, why_not_ours, folder) is None


@needs_root
def test_root_is_trusted_by_all(folder):
    assert as_user(ALICE, why_not_ours, folder) is None


@needs_root
@pytest.mark.parametrize("place", ["last", "middle"])
def test_a_link_of_another_user_is_not(folder, place):
    (folder / "target" / "cache").mkdir(parents=True)
    link = folder / "link"
    link.symlink_to("target", target_is_directory=True)
    path = link / "cache" if place == "middle" else link
    assert why_not_ours(path) is None
    os.lchown(link, ALICE, ALICE)
    assert why_not_ours(path) == f"goes through the link {link} of another user (uid {ALICE})"


def test_links_are_followed_to_the_end(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "two").symlink_to("../one/b")
    (tmp_path / "a" / "b").chmod(0o777)
    assert why_not_ours(tmp_path / "one" / "two") == "may be written by every user"


def test_a_circle_of_links_is_an_error(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        why_not_ours(tmp_path / "one")
