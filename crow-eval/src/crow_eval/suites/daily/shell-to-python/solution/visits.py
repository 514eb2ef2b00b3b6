"""Print the pages that were visited most often, and how many requests failed: visits.py [-n NUMBER] FILE..."""

import os
import sys
from collections import Counter


def fail(message, code):
    print(message, file=sys.stderr)
    sys.exit(code)


def main(arguments):
    number = 5
    if arguments[:1] == ["-n"]:
        text = "".join(arguments[1:2])
        if not text or text.strip("0123456789"):
            fail("visits.py: -n needs a number", 2)
        number = int(text)
        arguments = arguments[2:]
    if not arguments:
        fail("usage: visits.py [-n NUMBER] FILE...", 2)

    pages = Counter()
    failed = 0
    for path in arguments:
        if not os.path.isfile(path):
            fail(f"visits.py: no file {path}", 1)
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields = [*line.split(), "", "", "", ""]
                address, method, page, status = fields[:4]
                if not address or address.startswith("#"):
                    continue
                failed += len(status) == 3 and status[0] in "45"
                if method == "GET" and page:
                    pages[page.partition("?")[0]] += 1

    for page, count in sorted(pages.items(), key=lambda item: (-item[1], item[0]))[:number]:
        print(page, count)
    print(failed, "failed")


if __name__ == "__main__":
    main(sys.argv[1:])
