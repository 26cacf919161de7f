"""What `make dist` builds: files with signed hashes, which pip checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.tools import find_or_install

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MAKEFLAGS", "MFLAGS"}}


def run(
    *command: str, directory: Path = ROOT, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=directory, capture_output=True, env=ENVIRONMENT | (more or {}), check=False)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release, signed, and beside their directory the signers whom somebody allows."""
    directory = tmp_path_factory.mktemp("release")
    keygen = find_or_install("ssh-keygen", "openssh-client")
    key = directory / "key"
    assert run(keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(key)).returncode == 0
    (directory / "allowed_signers").write_text(f"release@duemq {key.with_suffix('.pub').read_text()}")
    made = run("make", "-s", "dist", f"DIST={directory / 'dist'}", f"KEY={key}")
    assert made.returncode == 0, made.stderr.decode()
    return directory / "dist"


def documented(name: str) -> str:
    """The command of docs/security.md that begins with a word, without the prompt."""
    (command,) = re.findall(
        rf"^  ({name} .*)$", (ROOT / "docs" / "security.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    return str(command)


def verify(directory: Path) -> bool:
    """Whether the documented commands accept the files in a directory."""
    command = documented("ssh-keygen").replace("allowed_signers", "../allowed_signers")
    commands = f"{command} && {documented('sha256sum')}"
    return run("bash", "-c", commands, directory=directory).returncode == 0


def install(directory: Path, requirements: str) -> bytes:
    """Have pip take duemq alone from a directory; return what it complains of."""
    (directory / "duemq.txt").write_text(requirements[requirements.index("duemq==") :])
    options = [
        "--quiet",
        "--no-deps",
        "--no-index",
        "--find-links",
        ".",
        "--require-hashes",
        "--requirement",
        "duemq.txt",
    ]
    done = run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        *options,
        "--dest",
        "taken",
        directory=directory,
    )
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr


def test_a_release_is_signed_and_pip_checks_its_hashes(release: Path, tmp_path: Path) -> None:
    (wheel,) = release.glob("*.whl")
    requirements = release / wheel.name.replace("-py3-none-any.whl", "-requirements.txt")
    names = {path.name for path in release.iterdir()}
    archive = wheel.name.replace("-py3-none-any.whl", ".tar.gz")
    assert names == {wheel.name, archive, requirements.name, "SHA256SUMS", "SHA256SUMS.sig"}
    assert requirements.name in documented("pip"), "the page has the name of the file"
    copy = tmp_path / "dist"
    shutil.copytree(release, copy)
    shutil.copy(release.parent / "allowed_signers", tmp_path)
    assert verify(copy)
    text = requirements.read_text(encoding="utf-8")
    assert text.startswith((ROOT / "requirements" / "broker.txt").read_text(encoding="utf-8"))
    assert install(copy, text) == b""


@pytest.mark.parametrize("suffix", [".whl", ".txt", ".tar.gz", "SHA256SUMS"])
def test_files_that_were_changed_are_found(release: Path, tmp_path: Path, suffix: str) -> None:
    copy = tmp_path / "dist"
    shutil.copytree(release, copy)
    shutil.copy(release.parent / "allowed_signers", tmp_path)
    (changed,) = copy.glob(f"*{suffix}")
    with changed.open("ab") as file:
        file.write(b"\n")
    assert not verify(copy)
    if suffix == ".whl":
        (text,) = (path.read_text(encoding="utf-8") for path in copy.glob("*-requirements.txt"))
        (copy / changed.name.replace("-py3-none-any.whl", ".tar.gz")).unlink()
        assert b"DO NOT MATCH THE HASHES" in install(copy, text)


def test_two_builds_of_a_commit_are_equal_whatever_else_lies_in_the_tree(
    release: Path, builder: Path, tmp_path: Path
) -> None:
    """Files that git ignores or does not know, and changes that are not committed, are in no release."""
    tree = tmp_path / "tree"
    assert run("git", "clone", "--quiet", "--shared", str(ROOT), str(tree)).returncode == 0
    (tree / "broker" / "data").mkdir()
    (tree / ".venv").symlink_to(ROOT / ".venv")
    for name in ("broker/secret.env", "broker/main.py.orig", "broker/data/commit", "protocol/new.py", "docs/mine.md"):
        (tree / name).write_text("not committed")
    for name in ("pyproject.toml", "broker/main.py", "requirements/broker.txt", "README.md"):
        with (tree / name).open("a") as file:
            file.write("# not committed\n")
    # The environment is that of another tree: nothing is installed into it. The build backend is at hand, and is not
    # installed twice more, as for the first build.
    (packages,) = builder.parents[1].glob("lib/python*/site-packages")
    options = ["-o", ".venv/.dev", f"DIST={tmp_path / 'dist'}", "BUILD_OPTIONS=--no-isolation"]
    made = run("make", "-s", *options, "dist", directory=tree, more={"PYTHONPATH": str(packages)})
    assert made.returncode == 0, made.stderr.decode()
    assert b"changes that are not committed are not built" in made.stderr
    assert (tmp_path / "dist" / "SHA256SUMS").read_bytes() == (release / "SHA256SUMS").read_bytes()
    assert not (tmp_path / "dist" / "SHA256SUMS.sig").exists(), "without a key"


def test_a_release_needs_a_key_and_a_commit(tmp_path: Path) -> None:
    done = run("make", "-s", "-o", "audit", "release", f"DIST={tmp_path / 'dist'}")
    assert (done.returncode, b"give KEY=" in done.stdout) == (2, True)
    assert not (tmp_path / "dist").exists()
