"""Count the words, or the lines, of files."""

import argparse


def count_words(path):
    with open(path, encoding="utf-8") as file:
        return len(file.read().split())


def count_lines(path):
    with open(path, encoding="utf-8") as file:
        return sum(1 for _ in file)


def main():
    parser = argparse.ArgumentParser(description="Count the words of files.")
    parser.add_argument("-l", "--lines", action="store_true", help="count lines instead of words")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args()

    count_of = count_lines if options.lines else count_words
    total = 0
    for path in options.files:
        count = count_of(path)
        total += count
        print(count, path)
    if len(options.files) > 1:
        print(total, "total")


if __name__ == "__main__":
    main()
