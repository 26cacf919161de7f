"""Every command line of duemq in README, docs and help is one that the command line takes: commands, options and values
exist. Nothing is run here; tests/process/pages/test_readme.py runs what the README says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from duemq.cli import main

ROOT = Path(__file__).parents[4]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:\$ )?(?:.* \| )?(?:\.venv/bin/)?(duemq (?:-|[a-z]).*)")


def documented() -> Iterator[tuple[str, str]]:
    """Each command line and where it is."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in command_lines("\n".join(each for each in text.splitlines() if each.startswith("    "))):
            yield page.name, line
    for path, command in commands(main, "duemq"):
        for line in command_lines(command.help or ""):
            yield f"{path} --help", line


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, each with its path."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, f"{path} {name}")


def command_lines(text: str) -> Iterator[str]:
    """The command lines of a text, each with the lines that continue it."""
    lines = iter(text.splitlines())
    for line in lines:
        found = COMMAND.fullmatch(line.strip())
        if found is not None:
            command = found[1]
            while command.count('"') % 2:
                command += " " + next(lines).strip()
            yield command


def words(line: str) -> list[str]:
    """The arguments behind `duemq`. A comment, a pipe, or an explanation behind two blanks ends them."""
    lexer = shlex.shlex(re.split(r"  |#", line)[0], posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found = list(lexer)
    end = next((number for number, word in enumerate(found) if set(word) <= set("|&;<>")), len(found))
    return found[1:end]


LINES = sorted(set(documented()))


@pytest.mark.filterwarnings("ignore:.*protected_args:DeprecationWarning")
@pytest.mark.parametrize(("where", "line"), LINES, ids=[f"{where}: {line}" for where, line in LINES])
def test_it_is_taken(where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files that a command line names must exist, and those of accounts must have their keys.
    monkeypatch.chdir(tmp_path)
    command: click.Command = main
    context = None
    arguments = words(line)
    for word in arguments:
        if not word.startswith(("-", "/")) and "." in word:
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).write_text("accessKey: administrator\nsecretKey: 5Jx0v3n7QmZt2cYw\n")
    while True:
        context = command.make_context(command.name, arguments, parent=context)
        if not isinstance(command, click.Group) or not (context.protected_args or context.args):
            return
        name, child, arguments = command.resolve_command(context, [*context.protected_args, *context.args])
        assert child is not None, name
        command = child


def test_there_are_some() -> None:
    assert len(LINES) > 60
