"""Build the page: page.md to build/page.html."""

from pathlib import Path

Path("build").mkdir(exist_ok=True)
text = Path("page.md").read_text("utf-8")
Path("page.tmp").write_text(text, "utf-8")
Path("build/page.html").write_text(f"<pre>{text}</pre>", "utf-8")
