"""The page on the command line is the help of the commands."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_docs_contain_the_help_of_every_command() -> None:
    path = ROOT / "scripts" / "generate_cli_help.py"
    spec = importlib.util.spec_from_file_location("generate_cli_help", path)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    assert script.render() == script.TARGET.read_text("utf-8"), "docs/cli.md is stale: run scripts/generate_cli_help.py"
