"""Rewrite a file of settings of version 1 as version 2."""

import json
import sys
from pathlib import Path


def migrate(old):
    """Return settings of version 1 as settings of version 2."""
    new = {"version": 2}
    for key, value in old.items():
        if key == "server":
            host, _, port = value.partition(":")
            new["server"] = {"host": host, "port": int(port or 443)}
        elif key == "timeout_ms":
            new["timeout"] = value / 1000
        elif key == "colour":
            new["color"] = value == "on"
        elif key == "plugins":
            new["plugins"] = [name.strip() for name in value.split(",") if name.strip()]
        elif key != "version":
            new[key] = value
    return new


def main():
    path = Path(sys.argv[1])
    settings = json.loads(path.read_text("utf-8"))
    version = settings.get("version", 1)
    if version == 2:
        return
    if version != 1:
        sys.exit(f"{path} is of version {version!r}, which cannot be migrated")
    path.write_text(json.dumps(migrate(settings), indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
