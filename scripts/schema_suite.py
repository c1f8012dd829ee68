"""What of JSON Schema is enforced, by the official JSON-Schema-Test-Suite: the table of docs/structured-output.md.

git clone --depth 1 https://github.com/json-schema-org/JSON-Schema-Test-Suite
python scripts/schema_suite.py JSON-Schema-Test-Suite/tests/draft2020-12

Each case of the suite is a schema with instances, some valid and some not. A schema is refused, or it becomes a
grammar; then no instance that is not valid may match it. Not every valid one does: the grammar writes properties in the
schema's order, and objects without more properties than they list.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine.constraints.tokenizer import build_tokenizer
from server import model_store
from server.structured.grammar import GrammarBuilder
from server.structured.schema import SchemaError, prepare
from server.text.loading import load_tokenizer
from server.text.tokenizer import Tokenizer
from server.text.vocabulary import vocabulary


@dataclass
class Line:
    """What became of the schemas of one keyword, and of the instances of those that were taken."""

    schemas: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Judge:
    """Schemas and instances against the grammar."""

    tokenizer: Tokenizer
    matching: LLTokenizer

    def grammar(self, schema: Any) -> str | None:
        """None if the schema is refused."""
        builder = GrammarBuilder(self.tokenizer)
        try:
            grammar = builder.build(builder.schema(prepare(schema)))
        except SchemaError:
            return None
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return None if matcher.is_error() else grammar

    def matches(self, grammar: str, instance: Any) -> bool:
        """Whether a model could have written the instance."""
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        tokens = self.tokenizer.encode(json.dumps(instance, ensure_ascii=False), False, parse_special=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(keyword, case) of the obligatory part, and of formats as they are asserted."""
    for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/format/*.json"))]:
        keyword = path.stem if path.parent == folder else f"format: {path.stem}"
        for case in json.loads(path.read_text(encoding="utf-8")):
            yield keyword, case


def count(folder: Path, judge: Judge, wrong: list[str]) -> dict[str, Line]:
    """By keyword; instances that match and are not valid are named in `wrong`."""
    lines: dict[str, Line] = {}
    for keyword, case in cases(folder):
        line = lines.setdefault(keyword, Line())
        grammar = judge.grammar(case["schema"])
        if grammar is None:
            line.schemas["refused"] += 1
            continue
        escaped = 0
        for test in case["tests"]:
            if test["valid"]:
                line.instances["valid"] += 1
                line.instances["written"] += judge.matches(grammar, test["data"])
                continue
            line.instances["invalid"] += 1
            if judge.matches(grammar, test["data"]):
                escaped += 1
                wrong.append(
                    f"{keyword}: {case['description']}: {test['description']}: {json.dumps(test['data'])[:80]}"
                )
        line.instances["escaped"] += escaped
        line.schemas["loose" if escaped else "enforced"] += 1
    return lines


def row(name: str, line: Line) -> str:
    schemas, instances = line.schemas, line.instances
    cells = [schemas.total(), schemas["enforced"], schemas["refused"], schemas["loose"]]
    rejected = instances["invalid"] - instances["escaped"]
    return (
        f"| {name} | "
        + " | ".join(map(str, cells))
        + (f" | {rejected} of {instances['invalid']} | {instances['written']} of {instances['valid']} |")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="tests of one draft, e.g. tests/draft2020-12")
    folder = parser.parse_args().folder
    tokenizer = load_tokenizer(model_store.packaged_model_path()).tokenizer
    judge = Judge(tokenizer, build_tokenizer(vocabulary(tokenizer, tokenizer.vocab_size)))
    wrong: list[str] = []
    lines = count(folder, judge, wrong)
    whole = Line()
    table = ["| keyword | schemas | enforced | refused | loose | invalid rejected | valid written |"]
    table.append("|---|---|---|---|---|---|---|")
    for keyword, line in lines.items():
        table.append(row(f"`{keyword}`", line))
        whole.schemas += line.schemas
        whole.instances += line.instances
    table.append(row("all", whole))
    sys.stdout.write("\n".join(table) + "\n")
    sys.stderr.writelines(f"{text}\n" for text in wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main())
