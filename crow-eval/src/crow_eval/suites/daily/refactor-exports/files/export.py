"""Export what was sold, by region. A sale is a dict with region, pieces and price, and perhaps returned."""


def as_csv(sales, minimum=0):
    """Return the turnover of the regions that reach the minimum, as CSV."""
    totals = {}
    counts = {}
    for sale in sales:
        if sale.get("returned"):
            continue
        region = (sale["region"] or "unknown").strip().title()
        totals[region] = totals.get(region, 0) + sale["pieces"] * sale["price"]
        counts[region] = counts.get(region, 0) + sale["pieces"]
    rows = []
    for region, total in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        if total >= minimum:
            rows.append((region, counts[region], f"{total:.2f}"))
    lines = ["region,pieces,total"]
    for region, count, total in rows:
        quoted = region.replace('"', '""')
        lines.append(f'"{quoted}",{count},{total}')
    return "\n".join(lines) + "\n"


def as_markdown(sales, minimum=0):
    """Return the turnover of the regions that reach the minimum, as a Markdown table."""
    amounts = {}
    numbers = {}
    for entry in sales:
        if entry.get("returned"):
            continue
        name = (entry["region"] or "unknown").strip().title()
        amounts[name] = amounts.get(name, 0) + entry["pieces"] * entry["price"]
        numbers[name] = numbers.get(name, 0) + entry["pieces"]
    found = []
    for name, amount in sorted(amounts.items(), key=lambda item: (-item[1], item[0])):
        if amount >= minimum:
            found.append((name, numbers[name], f"{amount:.2f}"))
    lines = ["| region | pieces | total |", "|---|---|---|"]
    for name, number, amount in found:
        escaped = name.replace("|", "\\|")
        lines.append(f"| {escaped} | {number} | {amount} |")
    return "\n".join(lines) + "\n"


def as_html(sales, minimum=0):
    """Return the turnover of the regions that reach the minimum, as an HTML table."""
    sums = {}
    pieces = {}
    for row in sales:
        if row.get("returned"):
            continue
        place = (row["region"] or "unknown").strip().title()
        sums[place] = sums.get(place, 0) + row["pieces"] * row["price"]
        pieces[place] = pieces.get(place, 0) + row["pieces"]
    cells = []
    for place, turnover in sorted(sums.items(), key=lambda item: (-item[1], item[0])):
        if turnover >= minimum:
            cells.append((place, pieces[place], f"{turnover:.2f}"))
    lines = ["<table>"]
    for place, count, turnover in cells:
        escaped = place.replace("&", "&amp;").replace("<", "&lt;")
        lines.append(f"<tr><td>{escaped}</td><td>{count}</td><td>{turnover}</td></tr>")
    return "\n".join([*lines, "</table>"]) + "\n"
