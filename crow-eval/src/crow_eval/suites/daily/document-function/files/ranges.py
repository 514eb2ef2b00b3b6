def fold(numbers):
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
