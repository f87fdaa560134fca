"""The documents: every link, every cited section and every named test is there."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CITING = [
    path
    for folder in ("neuron_streams", "models", "examples", "benchmarks", "tests")
    for suffix in ("py", "c", "cpp", "h")
    for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))
]
# docs/name.md, "A section", "another" and "a third"
CITATION = re.compile(r'(docs/[\w-]+\.md),((?:(?:,| and)? "[^"]+")+)')
TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
ROW = re.compile(r"^\| (S?\d+b?) \| .* \| (.*) \|$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The headings of a document, as its links name them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def plain(text: str) -> str:
    """Without comment signs and line breaks, so that a citation may be wrapped."""
    return re.sub(r"\s*\n\s*(?:#|//|\*)?\s*", " ", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_source_distribution_has_what_the_readme_links_to() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    sdist = settings.split("[tool.hatch.build.targets.sdist]")[1].split("\n[")[0]
    for link in re.findall(r"\]\(([\w-]+)[/)]", (ROOT / "README.md").read_text()):
        assert f'"{link}"' in sdist, link


def test_every_cited_document_and_section_is_there() -> None:
    sections = {}
    for document in DOCUMENTS:
        headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
        sections[document.relative_to(ROOT).as_posix()] = set(headings)
    cited = set()
    for path in CITING:
        text = plain(path.read_text())
        for name in re.findall(r"docs/[\w-]+\.md", text):
            assert name in sections or path == Path(__file__), f"{path} cites {name}"
        for name, headings in CITATION.findall(text):
            if path != Path(__file__):
                cited |= {(name, heading) for heading in re.findall(r'"([^"]+)"', headings)}
    assert len(cited) > 5, "the citations are found"
    assert {(name, heading) for name, heading in cited if heading not in sections[name]} == set()


def test_the_tests_of_the_decode_system_follow_its_sections() -> None:
    document = (ROOT / "docs/async-decode.md").read_text()
    order = re.findall(r"^## (.+)$", document, re.MULTILINE)
    tests = (ROOT / "tests/decode/test_async_decode.py").read_text()
    comments = [line.split(":")[0] for line in re.findall(r"^# (.+)$", tests, re.MULTILINE)]
    assert sorted(comments, key=order.index) == comments


def test_every_setting_is_in_a_document() -> None:
    found: set[str] = set()
    for path in CITING:
        if "neuron_streams" in path.relative_to(ROOT).parts:
            found |= set(re.findall(r"NEURON_STREAMS_[A-Z_]*[A-Z]", path.read_text()))
    assert len(found) > 10, "the settings are found"
    documents = "".join(document.read_text() for document in DOCUMENTS)
    assert {name for name in found if f"`{name}`" not in documents} == set()


def rows() -> dict[str, set[str]]:
    """Of docs/reports.md: the tests that each row names, as `path::name`."""
    found = {}
    for number, named in ROW.findall((ROOT / "docs/reports.md").read_text()):
        assert number not in found, f"two rows {number}"
        found[number] = set(re.findall(r"`([^`]+)`", named))
    return found


def test_every_report_names_tests_that_exist() -> None:
    assert len(rows()) > 50, "the rows are found"
    for number, tests in rows().items():
        assert tests, f"row {number} names no test"
        for test in tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), f"row {number}: {test}"
            assert name in TEST.findall((ROOT / path).read_text()), f"row {number}: {test}"


def test_every_test_of_a_report_is_in_its_row() -> None:
    listed = rows()
    missing = defaultdict(list)
    for path in sorted((ROOT / "tests/decode").glob("test_*.py")):
        for name in TEST.findall(path.read_text()):
            for number in numbers(name):
                test = f"{path.relative_to(ROOT).as_posix()}::{name}"
                if test not in listed.get(number, ()):
                    missing[number].append(test)
    assert not missing


def numbers(test: str) -> list[str]:
    """The rows that a test is named after: of test_rows_59_60_and_71_x, 59, 60 and 71."""
    if (found := re.match(r"test_rows_((?:\d+_)+)(and|to)_(\d+)_", test)) is not None:
        some, last = [int(n) for n in found[1].split("_") if n], int(found[3])
        if found[2] == "to":
            some = list(range(some[0], last))
        return [str(n) for n in (*some, last)]
    one = re.match(r"test_row_(\d+b?)_", test)
    return [one[1]] if one is not None else []


def test_every_report_on_streams_is_in_the_table() -> None:
    path = "tests/contract/test_reports.py"
    numbered = [name for name in TEST.findall((ROOT / path).read_text()) if re.search(r"_\d", name)]
    listed = set().union(*rows().values())
    assert [name for name in numbered if f"{path}::{name}" not in listed] == []
