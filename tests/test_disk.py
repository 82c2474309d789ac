"""Files written in one move: modes, links, names at the limit; and what is told of a path that can't be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from speechrl.disk import check_writable, write_lines


def test_a_fault_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    def lines():
        yield "new"
        raise OSError

    write_lines(tmp_path / "a", ["old"])
    with pytest.raises(OSError):
        write_lines(tmp_path / "a", lines())
    assert (tmp_path / "a").read_text() == "old\n"
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_users_mode_and_an_old_one_its_own(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_lines(tmp_path / "new", ["a"])
        (tmp_path / "old").touch(0o600)
        (tmp_path / "old").chmod(0o640)
        write_lines(tmp_path / "old", ["a"])
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "old")] == [0o600, 0o640]


def test_the_file_behind_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    for text in ("a", "b"):  # at first the link leads nowhere
        check_writable("--out", tmp_path / "link")
        write_lines(tmp_path / "link", [text])
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "file").read_text() == f"{text}\n"


@pytest.mark.parametrize("name", ["n" * 255, "\u96f6" * 85])  # 255 bytes, the most that a name may have
def test_a_name_may_be_as_long_as_the_system_takes(name: str, tmp_path: Path) -> None:
    check_writable("--out", tmp_path / name)
    write_lines(tmp_path / name, ["a"])
    assert (tmp_path / name).read_text() == "a\n"


def test_what_can_not_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        (tmp_path, "it exists and is no ordinary file"),
        (tmp_path / "pipe", "it exists and is no ordinary file"),
        (tmp_path / "file" / "a", "File exists"),
        (tmp_path / ("n" * 256), "File name too long"),
    ):
        with pytest.raises(ValueError, match=f"--out .* can't be written: {told}"):
            check_writable("--out", path)
