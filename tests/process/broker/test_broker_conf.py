"""duemq reads a broker.conf as Java does: java.util.Properties reads each text too, for comparison."""

from __future__ import annotations

import base64
import random
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from duemq.broker.errors import ConfigError
from duemq.broker.settings import broker_conf

PROGRAM = """
import java.io.*; import java.util.*; import java.nio.charset.StandardCharsets;
public class Read {
    static String coded(String text) {
        return Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
    }
    public static void main(String[] args) throws IOException {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null;) {
            Properties found = new Properties();
            found.load(new StringReader(new String(Base64.getDecoder().decode(line), StandardCharsets.UTF_8)));
            StringJoiner told = new StringJoiner(" ");
            for (String name : found.stringPropertyNames()) {
                told.add(coded(name) + "," + coded(found.getProperty(name).strip()));
            }
            System.out.println(told);
        }
    }
}
"""
NAMES = ["a", "b=", "c:", "0=1", "\\u00e4", "ä"]
MARKS = [" ", "\t", "\f", "\\\n", "\\\r\n  ", "\n", "\r", "\r\n", "#", "!", "=", ":", "\\"]


def texts(count: int) -> list[str]:
    chance = random.Random(1)
    made = ["".join(chance.choices(NAMES + MARKS, k=chance.randrange(1, 14))) for _ in range(count)]
    # Java and the library differ in how they continue an empty line, which nobody writes.
    return [text for text in made if not re.search(r"(^|[\r\n])[ \t\f]*\\[\r\n]", text)]


def read_by_java(directory: Path, asked: list[str]) -> list[dict[str, str]]:
    (directory / "Read.java").write_text(PROGRAM)
    run = subprocess.run(
        ["java", "Read.java"],
        cwd=directory,
        input="".join(base64.b64encode(text.encode()).decode() + "\n" for text in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return [dict(decoded(pair) for pair in line.split()) for line in run.stdout.splitlines()]


def decoded(pair: str) -> tuple[str, str]:
    name, value = (base64.b64decode(part).decode() for part in pair.split(","))
    return name, value


def test_java_reads_the_same(tmp_path: Path) -> None:
    asked = texts(3000)
    compared = 0
    for text, expected in zip(asked, read_by_java(tmp_path, asked), strict=True):
        with suppress(ConfigError):  # duemq refuses a name without a value
            found = broker_conf.parse(text, "a text")
            if "" not in expected:  # Java finds an empty name in some texts that end in a backslash
                assert found == expected, text
                compared += 1
    assert compared > len(asked) / 4
