"""Print the sum of the numbers in a file, one a line."""

import sys


def read_numbers(path):
    with open(path, encoding="utf-8") as file:
        return [float(line) for line in file if line.strip()]


def main():
    [path] = sys.argv[1:]
    try:
        numbers = read_numbers(path)
    except FileNotFoundError:
        print(f"total.py: there is no file {path}", file=sys.stderr)
        sys.exit(2)
    print(f"{sum(numbers):.2f}")


if __name__ == "__main__":
    main()
