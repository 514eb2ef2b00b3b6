def fold(numbers):
    """Return whole numbers as a short text, in which neighbours are folded to ranges.

    `numbers` is any iterable of whole numbers, in any order; a number that is there twice counts once. The text has the
    numbers in order, with commas and without spaces. Three neighbours or more become a range; two do not.

    >>> fold([5, 1, 2, 3])
    '1-3,5'
    >>> fold([4, 3, 4, 9, 3])
    '3,4,9'
    >>> fold(range(7, 12))
    '7-11'
    >>> fold([0])
    '0'

    No numbers give an empty text.

    >>> fold([])
    ''

    Raise ValueError if a number is below zero.

    >>> fold([3, -1])
    Traceback (most recent call last):
    ValueError: -1 is below zero
    """
    ordered = sorted(set(numbers))
    for number in ordered:
        if number < 0:
            raise ValueError(f"{number} is below zero")
    parts = []
    run = []
    for number in [*ordered, None]:
        if run and number != run[-1] + 1:
            if run[-1] - run[0] > 1:
                parts.append(f"{run[0]}-{run[-1]}")
            else:
                parts += map(str, run)
            run = []
        run.append(number)
    return ",".join(parts)
