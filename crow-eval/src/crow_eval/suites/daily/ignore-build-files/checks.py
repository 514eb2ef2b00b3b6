import subprocess
from pathlib import Path

IGNORED = ["build/page.html", "build/css/site.css", "build/deep/er/a.py", "old.tmp", "src/a.tmp", "src/b/c.tmp"]
SEEN = [
    ".gitignore",
    "page.html",
    "tmp",
    "tmp/notes.md",
    "src/builder.py",
    "src/tmp.py",
    "src/x.tmpl",
    "build_tools/pack.py",
    "build.toml",
    "docs/building.md",
    "src/site.css",
]


def git_ignores_what_is_built(workspace: Path, answer: str) -> None:
    for path in IGNORED:
        assert is_ignored(workspace, path), f"git sees {path}"
    for path in SEEN:
        assert not is_ignored(workspace, path), f"git ignores {path}"
    for path in ("src/builder.py", "build_tools/pack.py", "page.md"):
        assert (workspace / path).is_file(), f"{path} is gone"


def is_ignored(workspace: Path, path: str) -> bool:
    """Ask git, whatever the user's own list of ignored files and the repository's index say."""
    command = ["git", "-c", "core.excludesFile=", "check-ignore", "-q", "--no-index", path]
    done = subprocess.run(command, cwd=workspace, capture_output=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0
