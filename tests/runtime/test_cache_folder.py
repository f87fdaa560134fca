"""Where the cache is, and whose: users without a home, and folders of other users."""

import os
import tempfile

import pytest

from neuron_streams import cache_folder
from neuron_streams._runtime import cache
from neuron_streams._runtime.cache import CacheError
from tests.runtime.other_users import ALICE, BOB, as_user, needs_root, open_folder
from tests.runtime.test_cache import refuses, writes


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("NEURON_STREAMS_CACHE", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is remembered


@pytest.fixture
def folder():
    with open_folder() as made:
        yield made


def by_uid(uid=None):
    return f"neuron_streams-{os.geteuid() if uid is None else uid}"


def test_the_environment_says_where(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "neuron_streams"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "neuron_streams"
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert list(tmp_path.iterdir()) == []


def test_a_relative_one_stays_where_it_was(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_STREAMS_CACHE", "relative/cache")
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cache.keep("things", "key", "a.txt", refuses) == path
    assert path.is_relative_to(tmp_path / "relative" / "cache")


@pytest.mark.parametrize("xdg", ["", "relative", "~"])
def test_a_relative_xdg_folder_is_ignored(monkeypatch, tmp_path, xdg):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_folder() == tmp_path / ".cache" / "neuron_streams"


def test_a_tilde_is_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "anna"))
    monkeypatch.setenv("NEURON_STREAMS_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "anna" / "cache"


@pytest.mark.parametrize("home", ["", "/nonexistent", "relative", "~", "/dev/null"])
def test_without_a_home_it_is_named_by_the_uid(monkeypatch, tmp_path, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cache_folder() == tmp_path / by_uid()


@pytest.mark.parametrize("temporary", ["", "/nonexistent", "/dev/null"])
def test_without_a_temporary_folder_it_is_in_the_usual_one(monkeypatch, temporary):
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("TMPDIR", temporary)
    assert cache_folder().name == by_uid()
    assert cache_folder().is_absolute()


def test_where_nothing_can_be_written_it_has_a_name_all_the_same(monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert str(cache_folder()) == f"/tmp/{by_uid()}"


@needs_root
@pytest.mark.parametrize(
    ("home", "chosen"), [(None, None), ("/", None), ("/root", None), (None, "~/cache")]
)
def test_a_user_without_a_passwd_entry(monkeypatch, folder, home, chosen):
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    for name, value in (("HOME", home), ("NEURON_STREAMS_CACHE", chosen)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert as_user(ALICE, cache_folder) == folder / by_uid(ALICE)
    path = as_user(ALICE, cache.keep, "things", "key", "a.txt", writes("hello"))
    assert path.read_text() == "hello"
    assert as_user(ALICE, cache.find, "things", "key", "a.txt") == path


# Whose


@needs_root
def test_a_cache_of_root_serves_everybody(monkeypatch, folder):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(folder))
    path = cache.keep("things", "key", "a.txt", writes("hello"))
    assert as_user(ALICE, cache.keep, "things", "key", "a.txt", refuses) == path
    with pytest.raises(CacheError, match=r"things cannot be written \(Permission denied\)\. Give"):
        as_user(ALICE, cache.keep, "things", "other", "a.txt", refuses)


@needs_root
@pytest.mark.parametrize("place", ["", "things", "things/key", "things/key/a.txt"])
def test_what_cannot_be_read_is_said_to_be_so(monkeypatch, folder, place):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(folder))
    cache.keep("things", "key", "a.txt", writes("hello"))
    (folder / place).chmod(0o600)
    with pytest.raises(CacheError, match=r"cannot be read \(Permission denied\)\. Give this user"):
        as_user(ALICE, cache.keep, "things", "key", "a.txt", refuses)


@needs_root
@pytest.mark.parametrize("reader", [0, BOB])
def test_a_cache_of_another_user_is_refused(monkeypatch, folder, reader):
    folder.chmod(0o1777)
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(folder / "cache"))
    as_user(ALICE, cache.keep, "things", "key", "a.txt", writes("evil"))
    for key in ("key", "other"):
        with pytest.raises(CacheError, match=rf"belongs to another user \(uid {ALICE}\), and what"):
            as_user(reader, cache.keep, "things", key, "a.txt", refuses)


def test_where_it_is_is_not_said_of_one_that_others_may_write(monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="may be written by every user"):
        cache_folder()


@needs_root
def test_the_folder_that_anybody_could_guess_is_refused_to_its_maker(monkeypatch, folder):
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("HOME", "/nonexistent")
    as_user(ALICE, (folder / by_uid(BOB)).mkdir)
    with pytest.raises(CacheError, match=r"belongs to another user .* NEURON_STREAMS_CACHE\.$"):
        as_user(BOB, cache.keep, "things", "key", "a.txt", refuses)


@needs_root
def test_a_planted_link_is_refused(monkeypatch, folder):
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("HOME", "/nonexistent")
    own = folder / "own"
    as_user(BOB, own.mkdir)
    as_user(ALICE, (folder / by_uid(BOB)).symlink_to, own)
    with pytest.raises(CacheError, match=r"goes through the link .* of another user \(uid 12345\)"):
        as_user(BOB, cache.keep, "things", "key", "a.txt", refuses)
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("place", ["", "things", "things/key", "things/key/a.txt"])
def test_what_others_may_write_is_refused(monkeypatch, tmp_path, place):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path))
    cache.keep("things", "key", "a.txt", writes("hello"))
    (tmp_path / place).chmod(0o777)
    with pytest.raises(CacheError, match="may be written by every user, and what the cache holds"):
        cache.keep("things", "key", "a.txt", refuses)


@needs_root
@pytest.mark.parametrize("place", ["things", "things/key", "things/key/a.txt"])
def test_an_entry_of_another_user_is_refused(monkeypatch, tmp_path, place):
    monkeypatch.setenv("NEURON_STREAMS_CACHE", str(tmp_path))
    cache.keep("things", "key", "a.txt", writes("hello"))
    os.chown(tmp_path / place, ALICE, ALICE)
    with pytest.raises(CacheError, match=r"belongs to another user \(uid 12345\)"):
        cache.keep("things", "key", "a.txt", refuses)
