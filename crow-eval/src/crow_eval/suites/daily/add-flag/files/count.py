"""Count the words of files."""

import argparse


def count_words(path):
    with open(path, encoding="utf-8") as file:
        return len(file.read().split())


def main():
    parser = argparse.ArgumentParser(description="Count the words of files.")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args()

    total = 0
    for path in options.files:
        count = count_words(path)
        total += count
        print(count, path)
    if len(options.files) > 1:
        print(total, "total")


if __name__ == "__main__":
    main()
